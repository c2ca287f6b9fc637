
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

// The inner page has an opaque origin, so no other target can be named; it cannot leave its app (frame-src).
const tell = () => frame.contentWindow?.postMessage({ type: "svc:app-token", token, expiresAt }, "*");

const later = (seconds) => {
  clearTimeout(timer);
  timer = setTimeout(renew, Math.max(1, seconds) * 1000);
};

async function renew() {
  try {
    const answer = await fetch("/_svc/app-token", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ app: settings.app }),
    });
    // Signed out: the page asks whoever is there to sign in again.
    if (answer.status === 401) return location.reload();
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    ({ token, expiresAt } = await answer.json());
    tell();
    later(expiresAt - Date.now() / 1000 - RENEW_BEFORE_SECONDS);
    return true;
  } catch {
    later(RETRY_SECONDS);
    return false;
  }
}

addEventListener("message", async (event) => {
  if (event.source !== frame.contentWindow) return;
  if (event.data?.type === "svc:app-token-wanted") tell();
  // A fresh token that is refused at once would be refused for ever.
  const fresh = Date.now() - shownAt < RETRY_SECONDS * 1000;
  if (event.data?.type === "svc:app-token-ended" && !fresh && await renew()) show(settings.path);
});
// A computer that slept has missed its timer.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && expiresAt - Date.now() / 1000 < RENEW_BEFORE_SECONDS) renew();
});

show(settings.path + location.hash);
later(expiresAt - Date.now() / 1000 - RENEW_BEFORE_SECONDS);
