// The shell: the owner's handle and slot, the apps on a canvas, and the open panel, which shows an app or the files.

import "../../shared/base.css";
import "./style.css";
import { el, Toast } from "../../shared/ui";
import { type App, AppIcons } from "./apps";
import { Canvas } from "./canvas";
import { FilesView } from "./files/view";
import { fetchJson, RequestError, SignedOutError } from "./http";
import { idpHost } from "./idp";

const byId = <T extends HTMLElement>(id: string) => document.getElementById(id) as T;
const surface = byId("surface");
const world = byId("world");
const emptyMessage = byId("empty");
const panel = byId("panel");
const appName = byId("app-name");
const zoomLevel = byId("zoom-level");
const handle = byId("handle");
const newTabLink = byId<HTMLAnchorElement>("new-tab");
const slotLink = byId<HTMLAnchorElement>("slot");
const accountLink = byId<HTMLAnchorElement>("idp");
const closeButton = byId("close");
const signOutButton = byId("sign-out");
const filesButton = byId("show-files");
const closeFilesButton = byId("close-files");
/** Everything outside the panels; inert while a panel is open. */
const background = [surface, byId("owner"), byId("account"), byId("zoom")];
const toast = new Toast(document.body);

const REFRESH_INTERVAL_MS = 30_000;
/** The refresh interval while an app is being set up. */
const SETUP_REFRESH_INTERVAL_MS = 2_000;
const SIGN_OUT_TIMEOUT_MS = 10_000;
const FILES_HASH = "#/files";
let apps: App[] = [];
let openSlug = "";

const icons = new AppIcons(world, (app) => {
  location.hash = `#/apps/${app.slug}`;
});
const files = new FilesView(byId("files"), closeFilesButton);
const canvas = new Canvas(surface, world, () => icons.size(), (zoom) => {
  zoomLevel.textContent = `${Math.round(zoom * 100)}%`;
});

interface Slot {
  slot: string;
  handle: string;
  current: boolean;
}

async function showOwner(): Promise<void> {
  const { slots } = await fetchJson<{ slots: Slot[] }>("/_svc/slots");
  const current = slots.find((slot) => slot.current) ?? slots[0];
  if (!current) return;
  handle.textContent = current.handle;
  document.title = `${current.handle} · ${current.slot}`;
  slotLink.textContent = current.slot;
  const switchHint = slots.length > 1 ? `, switch between ${slots.length} computers` : "";
  slotLink.setAttribute("aria-label", `Slot ${current.slot}${switchHint}`);
  slotLink.hidden = false;
}

let refreshTimer = 0;
let isRefreshing = false;
/** Whether the toast shows why the last refresh failed. */
let isRefreshErrorShown = false;

/**
 * Reloads the app list, and schedules the next refresh. Does nothing while another refresh is in progress or the page
 * is hidden; when the page becomes visible, it is called again.
 */
async function refresh(): Promise<void> {
  clearTimeout(refreshTimer);
  if (isRefreshing || document.hidden) return;
  isRefreshing = true;
  let interval = REFRESH_INTERVAL_MS;
  try {
    ({ apps } = await fetchJson<{ apps: App[] }>("/api/apps"));
    if (isRefreshErrorShown) toast.dismiss();
    isRefreshErrorShown = false;
    const wasFitted = canvas.isFitted;
    icons.render(apps);
    emptyMessage.hidden = apps.some((app) => app.url);
    if (wasFitted) canvas.fit();
    if (apps.length === 0 || apps.some((app) => app.status === "waiting")) interval = SETUP_REFRESH_INTERVAL_MS;
    updatePanel();
  } catch (error) {
    showError(error, () => void refresh());
    isRefreshErrorShown = true;
  } finally {
    isRefreshing = false;
    refreshTimer = window.setTimeout(() => void refresh(), interval);
  }
}

function showError(error: unknown, retry: () => void): void {
  if (error instanceof SignedOutError) {
    // The router redirects page loads without a session to the sign-in page.
    toast.warn("You are signed out.", { label: "Sign in", run: () => location.assign("/") });
  } else {
    const message = error instanceof RequestError ? error.message : `Unexpected error: ${String(error)}`;
    toast.warn(message, { label: "Try again", run: retry });
  }
}

/** Opens the app or the files that the URL's hash names, and closes what was open. */
function updatePanel(): void {
  const slug = /^#\/apps\/([a-z][a-z0-9-]*)$/.exec(location.hash)?.[1] ?? "";
  const app = apps.find((candidate) => candidate.slug === slug && candidate.url);
  // The app list has not been loaded yet, or is empty.
  if (slug && !app && apps.length === 0) return;
  const shouldShowFiles = location.hash === FILES_HASH;
  const [previousSlug, wereFilesOpen] = [openSlug, files.isOpen];
  openSlug = app?.slug ?? "";
  if (openSlug === previousSlug && shouldShowFiles === wereFilesOpen) return;
  panel.hidden = !app;
  // A closed app must not keep running. Navigating an existing frame would also add an entry to the browser's history.
  document.getElementById("frame")?.remove();
  for (const element of background) element.inert = app !== undefined || shouldShowFiles;
  if (wereFilesOpen) files.close();
  if (app) {
    const name = app.name ?? app.slug;
    appName.textContent = name;
    panel.setAttribute("aria-label", name);
    newTabLink.href = app.url!;
    const frame = el("iframe", { id: "frame", title: name, src: app.url!, allow: "clipboard-write; fullscreen" });
    frame.onload = () => frame.focus();
    panel.append(frame);
  } else if (shouldShowFiles) {
    files.open();
  } else if (wereFilesOpen) {
    filesButton.focus();
  } else if (!icons.focus(previousSlug)) {
    surface.focus();
  }
}

async function signOut(): Promise<void> {
  try {
    const signal = AbortSignal.timeout(SIGN_OUT_TIMEOUT_MS);
    const response = await fetch("/_svc/sign-out", { method: "POST", signal });
    if (!response.ok) throw new Error(`sign-out: status ${response.status}`);
    location.assign("/");
  } catch {
    isRefreshErrorShown = false;
    toast.warn("Signing out failed.", { label: "Try again", run: () => void signOut() });
  }
}

closeButton.onclick = closeFilesButton.onclick = () => {
  location.hash = "#/";
};
filesButton.onclick = () => {
  location.hash = FILES_HASH;
};
byId("zoom-in").onclick = () => canvas.zoomBy(1.25);
byId("zoom-out").onclick = () => canvas.zoomBy(0.8);
byId("fit").onclick = () => canvas.fit();
signOutButton.onclick = () => void signOut();
world.addEventListener("focusin", (event) => {
  const target = event.target as HTMLElement;
  if (target.matches(":focus-visible")) canvas.scrollIntoView(target);
});
panel.addEventListener("keydown", (event) => {
  if (event.key === "Escape") closeButton.click();
});
addEventListener("hashchange", updatePanel);
document.addEventListener("visibilitychange", () => void refresh());
if (idpHost) {
  accountLink.href = `https://${idpHost}/`;
  accountLink.title = `Your account at ${idpHost}`;
  accountLink.hidden = false;
}

// Other errors are not shown: the page works without the owner's handle, and `refresh` reports an unreachable computer.
showOwner().catch((error: unknown) => {
  if (error instanceof SignedOutError) showError(error, () => undefined);
});
updatePanel();
void refresh();
