
"use strict";
const settings = JSON.parse(document.getElementById("settings").textContent);
const frame = document.getElementById("app");
const RENEW_BEFORE_SECONDS = 15 * 60;
const RETRY_SECONDS = 20;
let token = settings.token;
let expiresAt = settings.expiresAt;
let timer;
let shownAt = 0;

const show = (path) => {
  shownAt = Date.now();
  frame.src = `/apps/${settings.app}/~${token}/${path}`;
};

// The inner page has an opaque origin, so the target must be "*". The frame-src policy keeps the page within its app.
const postToken = () => frame.contentWindow?.postMessage({ type: "svc:app-token", token, expiresAt }, "*");

const scheduleRenewal = (seconds) => {
  clearTimeout(timer);
  timer = setTimeout(renew, Math.max(1, seconds) * 1000);
};

async function renew() {
  try {
    const response = await fetch("/_svc/app-token", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ app: settings.app }),
    });
    // The session has ended: reloading starts a new sign-in.
    if (response.status === 401) return location.reload();
    if (!response.ok) throw new Error(`status ${response.status}`);
    ({ token, expiresAt } = await response.json());
    postToken();
    scheduleRenewal(expiresAt - Date.now() / 1000 - RENEW_BEFORE_SECONDS);
    return true;
  } catch {
    scheduleRenewal(RETRY_SECONDS);
    return false;
  }
}

addEventListener("message", async (event) => {
  if (event.source !== frame.contentWindow) return;
  if (event.data?.type === "svc:app-token-wanted") postToken();
  // If a fresh token is rejected, a new one would be too: do not loop.
  const fresh = Date.now() - shownAt < RETRY_SECONDS * 1000;
  if (event.data?.type === "svc:app-token-ended" && !fresh && await renew()) show(settings.path);
});
// Timers do not fire while the computer sleeps.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && expiresAt - Date.now() / 1000 < RENEW_BEFORE_SECONDS) renew();
});

show(settings.path + location.hash);
scheduleRenewal(expiresAt - Date.now() / 1000 - RENEW_BEFORE_SECONDS);
