// The shell: whose computer this is, its apps on a canvas, one of them open at a time.

import "../../shared/base.css";
import "./style.css";
import { el, News } from "../../shared/ui";
import { type App, Icons, read, SignedOut } from "./apps";
import { Canvas } from "./canvas";
import { idpHost } from "./idp";

const find = <T extends HTMLElement>(id: string) => document.getElementById(id) as T;
const [surface, world, empty, panel] = ["surface", "world", "empty", "panel"].map((id) => find(id));
const [appName, scale, handle] = ["app-name", "scale", "handle"].map((id) => find(id));
const [alone, slotLink, idp] = ["alone", "slot", "idp"].map((id) => find<HTMLAnchorElement>(id));
const news = new News(document.body);

const LOOK_EACH_MS = 30_000;
const SOON_MS = 2_000;
let apps: App[] = [];
let opened = "";

const icons = new Icons(world!, (app) => {
  location.hash = `#/apps/${app.slug}`;
});
const canvas = new Canvas(surface!, world!, () => icons.size(), (zoom) => {
  scale!.textContent = `${Math.round(zoom * 100)}%`;
});

interface Slot {
  slot: string;
  handle: string;
  current: boolean;
}

async function who(): Promise<void> {
  const { slots } = await read<{ slots: Slot[] }>("/_svc/slots");
  const slot = slots.find((one) => one.current) ?? slots[0];
  if (!slot) return;
  handle!.textContent = slot.handle;
  document.title = `${slot.handle} · ${slot.slot}`;
  slotLink!.textContent = slot.slot;
  slotLink!.setAttribute("aria-label", `Slot ${slot.slot}${slots.length > 1 ? `, one of ${slots.length}: change` : ""}`);
  slotLink!.hidden = false;
}

let timer = 0;
let looking = false;

/** Looks at the apps, and again later; never twice at once. */
async function look(): Promise<void> {
  clearTimeout(timer);
  if (looking || document.hidden) return;
  looking = true;
  let next = LOOK_EACH_MS;
  try {
    const told = await read<{ apps: App[] }>("/api/apps");
    apps = told.apps;
    news.clear();
    const untouched = canvas.isUntouched;
    icons.show(apps);
    empty!.hidden = apps.some((app) => app.url);
    if (untouched) canvas.fit();
    if (apps.length === 0 || apps.some((app) => app.status === "waiting")) next = SOON_MS;
    route();
  } catch (error) {
    told(error, () => void look());
  } finally {
    looking = false;
    timer = window.setTimeout(() => void look(), next);
  }
}

function told(error: unknown, again: () => void): void {
  if (error instanceof SignedOut) {
    // Its page leads to the sign-in.
    news.warn("You are signed out.", { label: "Sign in", act: () => location.assign("/") });
  } else {
    news.warn("Your computer cannot be reached.", { label: "Try again", act: again });
  }
}

function route(): void {
  const slug = /^#\/apps\/([a-z][a-z0-9-]*)$/.exec(location.hash)?.[1] ?? "";
  const app = apps.find((one) => one.slug === slug && one.url);
  if (slug && !app && apps.length === 0) return;
  const before = opened;
  opened = app?.slug ?? "";
  if (opened === before) return;
  panel!.hidden = !app;
  // An app that is closed does not go on in the background; and a frame of its own leaves the way back alone.
  document.getElementById("frame")?.remove();
  for (const part of [surface, find("who"), find("account"), find("zoom")]) part!.inert = app !== undefined;
  if (app) {
    const name = app.name ?? app.slug;
    appName!.textContent = name;
    panel!.setAttribute("aria-label", name);
    alone!.href = app.url!;
    const frame = el("iframe", { id: "frame", title: name, src: app.url!, allow: "clipboard-write; fullscreen" });
    frame.onload = () => frame.focus();
    panel!.append(frame);
  } else {
    if (!icons.focus(before)) surface!.focus();
  }
}

find("close").onclick = () => {
  location.hash = "#/";
};
find("in").onclick = () => canvas.zoomBy(1.25);
find("out").onclick = () => canvas.zoomBy(0.8);
find("fit").onclick = () => canvas.fit();
find<HTMLButtonElement>("sign-out").onclick = async () => {
  try {
    const answer = await fetch("/_svc/sign-out", { method: "POST", signal: AbortSignal.timeout(10_000) });
    if (!answer.ok) throw new Error(`sign-out: ${answer.status}`);
    location.assign("/");
  } catch (error) {
    told(error, () => find("sign-out").click());
  }
};
world!.addEventListener("focusin", (event) => {
  const target = event.target as HTMLElement;
  if (target.matches(":focus-visible")) canvas.reveal(target);
});
panel!.addEventListener("keydown", (event) => {
  if (event.key === "Escape") find("close").click();
});
addEventListener("hashchange", route);
document.addEventListener("visibilitychange", () => void look());
if (idpHost) {
  idp!.href = `https://${idpHost}/`;
  idp!.title = `Your account at ${idpHost}`;
  idp!.hidden = false;
}

who().catch((error: unknown) => {
  if (error instanceof SignedOut) told(error, () => undefined);
});
void look();
