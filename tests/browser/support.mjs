// Chromium on the running stack: signed-in pages, what they asked for, and what they look like.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { request } from "node:http";
import { join } from "node:path";
import { test as once } from "node:test";
import { chromium } from "playwright-core";

export const stack = JSON.parse(readFileSync(process.env.SVC_HANDBILL, "utf8"));
const { port, protocol } = new URL(stack.routerUrl);
export const app = `${protocol}//${stack.appHost}:${port}`;
export const code = `${protocol}//${stack.codeHost}:${port}`;
export const PATIENCE = 20_000;
const LONGEST = 180_000;

const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
  // Names that end in .localhost are loopback by themselves; names of a router with TLS are not.
  `--host-resolver-rules=MAP ${stack.appHost} 127.0.0.1, MAP ${stack.codeHost} 127.0.0.1`,
];

export async function browser() {
  return chromium.launch({ executablePath: process.env.SVC_CHROMIUM, headless: true, args: FLAGS });
}

async function session() {
  const answer = await fetch(`${stack.idp.mintUrl}?sub=${stack.owner.idpUserId}&ttl=3600`, { signal: AbortSignal.timeout(PATIENCE) });
  assert.equal(answer.status, 200);
  return answer.text();
}

/** A browser of its own, signed in as the owner unless told otherwise; it notes every request and every complaint. */
export async function visitor(chrome, { signedIn = true, ...options } = {}) {
  // A router with TLS has a certificate of the tests' own CA.
  const ignoreHTTPSErrors = protocol === "https:";
  const context = await chrome.newContext({ viewport: { width: 1200, height: 800 }, ignoreHTTPSErrors, ...options });
  context.setDefaultTimeout(PATIENCE);
  const seen = { requests: [], complaints: [] };
  context.on("request", (request) => seen.requests.push(request.url()));
  context.on("console", (message) => {
    if (message.type() === "error") seen.complaints.push(message.text());
  });
  context.on("weberror", (error) => seen.complaints.push(String(error.error())));
  if (signedIn) {
    const value = await session();
    await context.addCookies([app, code].map((url) => ({ name: "__session", value, url })));
  }
  return { context, seen, page: await context.newPage() };
}

/** code-server's workbench through the router, as the owner; `file` is opened in it. */
export async function editor(chrome, { file, patience }) {
  const visit = await visitor(chrome);
  visit.context.setDefaultTimeout(patience);
  const sockets = [];
  visit.page.on("websocket", (socket) => sockets.push(socket.url()));
  const where = file ? `?payload=${encodeURIComponent(JSON.stringify([["openFile", `vscode-remote://${new URL(code).host}${file}`]]))}` : "";
  await until("code-server behind the router", async () => {
    const answer = await visit.page.goto(code + "/" + where);
    assert.equal(answer.status(), 200);
  }, patience);
  await visit.page.locator(".monaco-workbench").waitFor();
  return { ...visit, sockets };
}

/** Opens a terminal in the workbench and gives it the keyboard. */
export async function openTerminal(page, patience) {
  const command = page.locator(".quick-input-list .monaco-list-row", { hasText: "Terminal: Create New Terminal" }).first();
  await until("the command", async () => {
    // While its parts still start, the palette may be closed again.
    await page.keyboard.press("Escape");
    await page.keyboard.press("F1");
    await page.locator(".quick-input-widget input[type=text]").focus({ timeout: 2_000 });
    await page.keyboard.type("create new terminal");
    await command.click({ timeout: 5_000 });
  }, patience);
  await page.locator(".terminal-wrapper .xterm").waitFor();
  await page.locator(".xterm-helper-textarea").focus();
}

let tries = 2;

/** A test that fails or stands still is tried once more, and says so: a browser shares two processors with all that it looks at.
 *  More than two of a file are no accident. */
export function test(name, look) {
  once(name, async (context) => {
    try {
      return await within(LONGEST, look(context));
    } catch (error) {
      tries -= 1;
      if (tries < 0) throw error;
      console.error(`FLAKY, or failing: ${name}\n${error.stack}`);
    }
    return within(LONGEST, look(context));
  });
}

/** Ends a browser; one that does not end by itself goes with this process. */
export async function end(chrome) {
  await within(PATIENCE, chrome?.close()).catch((error) => console.error(`the browser's end: ${error.message}`));
}

function within(ms, work) {
  let timer;
  const late = new Promise((_, failed) => {
    timer = setTimeout(() => failed(new Error(`still not done after ${ms} ms`)), ms);
  });
  return Promise.race([work, late]).finally(() => clearTimeout(timer));
}

/** Whatever is waited for happens soon, or the test fails with the last that was seen. */
export async function until(what, look, patience = PATIENCE) {
  const end = Date.now() + patience;
  for (;;) {
    try {
      return await look();
    } catch (error) {
      if (Date.now() > end) throw new Error(`in vain: ${what}`, { cause: error });
    }
    await new Promise((done) => setTimeout(done, 50));
  }
}

/** Until the machine serves its shell and knows its apps. */
export async function ready() {
  const authorization = `Bearer ${await session()}`;
  await until("the shell and its apps", async () => {
    assert.equal((await get("/", { authorization })).status, 200);
    const { apps } = JSON.parse((await get("/api/apps", { authorization })).body);
    const bundled = apps.filter(({ slug }) => ["notes", "tasks"].includes(slug));
    assert.deepEqual(bundled.map(({ slug, status }) => [slug, status]), [["notes", "ready"], ["tasks", "ready"]]);
  });
}

/** Without a browser: a request to the router as the owner. */
export async function asOwner(path, headers = {}, method = "GET") {
  return get(path, { authorization: `Bearer ${await session()}`, ...headers }, method);
}

/** As whoever has no session. */
export async function asNobody(path, headers = {}) {
  return get(path, headers);
}

function get(path, headers, method = "GET") {
  return new Promise((done, failed) => {
    const options = { method, headers: { host: stack.appHost, ...headers }, timeout: PATIENCE };
    const sent = request(stack.routerUrl + path, options, (answer) => {
      const parts = [];
      answer.on("data", (part) => parts.push(part));
      answer.on("end", () => done({ status: answer.statusCode, headers: answer.headers, body: Buffer.concat(parts).toString() }));
    });
    sent.on("timeout", () => sent.destroy(new Error(`${path}: no answer`)));
    sent.on("error", failed).end();
  });
}

export async function shot(page, name) {
  await page.screenshot({ path: join(process.env.SVC_SCREENSHOTS, `${name}.png`) });
}

/** Nobody but our own hosts was asked, and the retired route not at all. */
export function stayedHome(seen) {
  const hosts = new Set(seen.requests.filter((url) => /^(https?|wss?):/.test(url)).map((url) => new URL(url).hostname));
  hosts.delete(stack.appHost);
  hosts.delete(stack.codeHost);
  assert.deepEqual([...hosts], []);
  assert.deepEqual(seen.requests.filter((url) => url.includes("/api/canvas")), []);
}

/** The basics that a screen reader needs; works inside any frame. */
export async function isAccessible(frame) {
  const faults = await frame.evaluate(() => {
    const faults = [];
    const shown = (element) => element.checkVisibility({ checkOpacity: false });
    const named = (element) =>
      element.getAttribute("aria-label") ||
      element.getAttribute("aria-labelledby")?.split(" ").map((id) => document.getElementById(id)?.textContent).join("") ||
      [...(element.labels ?? [])].map((label) => label.textContent).join("") ||
      element.textContent.trim();
    for (const element of document.querySelectorAll("button, a[href], input, textarea, select, iframe, [tabindex]")) {
      if (shown(element) && !named(element)?.trim() && !element.title) faults.push(`no name: ${element.outerHTML.slice(0, 120)}`);
    }
    for (const image of document.querySelectorAll("img")) {
      if (!image.hasAttribute("alt")) faults.push(`no alt: ${image.outerHTML}`);
    }
    for (const element of document.querySelectorAll("[tabindex]")) {
      if (element.tabIndex > 0) faults.push(`tab order: ${element.outerHTML.slice(0, 120)}`);
    }
    for (const element of document.querySelectorAll("[aria-labelledby], [aria-describedby], label[for]")) {
      for (const id of (element.getAttribute("aria-labelledby") ?? element.getAttribute("aria-describedby") ?? element.htmlFor).split(" ")) {
        if (!document.getElementById(id)) faults.push(`names nobody: ${id}`);
      }
    }
    const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
    for (const id of ids.filter((id, at) => ids.indexOf(id) !== at)) faults.push(`twice: #${id}`);
    if (!document.documentElement.lang) faults.push("no language");
    if (!document.title) faults.push("no title");
    const { scrollWidth, clientWidth } = document.documentElement;
    if (scrollWidth > clientWidth) faults.push(`wider than the window: ${scrollWidth} > ${clientWidth}`);

    // Contrast of texts on plain backgrounds, WCAG 2.2 AA.
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = (colour) => {
      const [r, g, b] = colour.map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
      for (let at = element; at; at = at.parentElement) {
        const colour = rgba(getComputedStyle(at).backgroundColor);
        if (colour[3] === 255) return colour;
        if (colour[3] > 0) return null;
      }
      return rgba(getComputedStyle(document.documentElement).backgroundColor);
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      if (!walker.currentNode.textContent.trim() || !element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) continue;
      if (element.closest(".sr-only, noscript, script, style")) continue;
      const style = getComputedStyle(element);
      const [back, front] = [ground(element), rgba(style.color)];
      if (!back || front[3] < 255) continue;
      const [one, two] = [light(front.slice(0, 3)), light(back.slice(0, 3))];
      const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
      const isLarge = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 700);
      if (ratio < (isLarge ? 3 : 4.5)) faults.push(`contrast ${ratio.toFixed(2)}: ${walker.currentNode.textContent.trim().slice(0, 40)}`);
    }
    return faults;
  });
  assert.deepEqual(faults, []);
}
