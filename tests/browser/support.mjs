// Drives Chromium against the running services: opens signed-in pages, and records their requests and appearance.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { request } from "node:http";
import { join } from "node:path";
import { test as nodeTest } from "node:test";
import { chromium } from "playwright-core";

export const stack = JSON.parse(readFileSync(process.env.SVC_SERVICE_INFO, "utf8"));
const { port, protocol } = new URL(stack.routerUrl);
export const app = `${protocol}//${stack.appHost}:${port}`;
export const code = `${protocol}//${stack.codeHost}:${port}`;
export const TIMEOUT_MS = 20_000;
const TEST_TIMEOUT_MS = 180_000;

const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
  // Names below .localhost resolve to loopback anyway; names of a router with TLS do not.
  `--host-resolver-rules=MAP ${stack.appHost} 127.0.0.1, MAP ${stack.codeHost} 127.0.0.1`,
];

export async function launchBrowser() {
  return chromium.launch({ executablePath: process.env.SVC_CHROMIUM, headless: true, args: FLAGS });
}

export async function mintSession(user = stack.owner.idpUserId) {
  const response = await fetch(`${stack.idp.mintUrl}?sub=${user}&ttl=3600`, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  assert.equal(response.status, 200);
  return response.text();
}

/** Opens a separate browser context, signed in as the owner by default; records requests and errors. */
export async function newVisitor(chrome, { signedIn = true, ...options } = {}) {
  // A router with TLS uses a certificate of the tests' CA.
  const ignoreHTTPSErrors = protocol === "https:";
  const context = await chrome.newContext({ viewport: { width: 1200, height: 800 }, ignoreHTTPSErrors, ...options });
  context.setDefaultTimeout(TIMEOUT_MS);
  const seen = { requests: [], errors: [] };
  context.on("request", (request) => seen.requests.push(request.url()));
  context.on("console", (message) => {
    if (message.type() === "error") seen.errors.push(message.text());
  });
  context.on("weberror", (error) => seen.errors.push(String(error.error())));
  if (signedIn) {
    const value = await mintSession();
    await context.addCookies([app, code].map((url) => ({ name: "__session", value, url })));
  }
  return { context, seen, page: await context.newPage() };
}

/** Opens code-server's workbench through the router as the owner, with `file` open. */
export async function openEditor(chrome, { file, timeoutMs }) {
  const visit = await newVisitor(chrome);
  visit.context.setDefaultTimeout(timeoutMs);
  const sockets = [];
  visit.page.on("websocket", (socket) => sockets.push(socket.url()));
  const query = file ? `?payload=${encodeURIComponent(JSON.stringify([["openFile", `vscode-remote://${new URL(code).host}${file}`]]))}` : "";
  await eventually("code-server behind the router", async () => {
    const response = await visit.page.goto(code + "/" + query);
    assert.equal(response.status(), 200);
  }, timeoutMs);
  await visit.page.locator(".monaco-workbench").waitFor();
  return { ...visit, sockets };
}

/** Opens a terminal in the workbench and focuses it. */
export async function openTerminal(page, timeoutMs) {
  const command = page.locator(".quick-input-list .monaco-list-row", { hasText: "Terminal: Create New Terminal" }).first();
  await eventually("the terminal command", async () => {
    // The palette may be closed again while the workbench is starting.
    await page.keyboard.press("Escape");
    await page.keyboard.press("F1");
    await page.locator(".quick-input-widget input[type=text]").focus({ timeout: 2_000 });
    await page.keyboard.type("create new terminal");
    await command.click({ timeout: 5_000 });
  }, timeoutMs);
  await page.locator(".terminal-wrapper .xterm").waitFor();
  await page.locator(".xterm-helper-textarea").focus();
}

let retriesLeft = 2;

/** Retries a failed or hanging test once, and reports it: the browser shares two processors with everything under test.
 *  At most two tests per file are retried. */
export function test(name, body) {
  nodeTest(name, async (context) => {
    try {
      return await withTimeout(TEST_TIMEOUT_MS, body(context));
    } catch (error) {
      retriesLeft -= 1;
      if (retriesLeft < 0) throw error;
      console.error(`FLAKY or failing: ${name}\n${error.stack}`);
    }
    return withTimeout(TEST_TIMEOUT_MS, body(context));
  });
}

/** Closes a browser. If it hangs, it is killed when this process ends. */
export async function closeBrowser(chrome) {
  await withTimeout(TIMEOUT_MS, chrome?.close()).catch((error) => console.error(`closing the browser: ${error.message}`));
}

function withTimeout(ms, work) {
  let timer;
  const timeout = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`timeout after ${ms} ms`)), ms);
  });
  return Promise.race([work, timeout]).finally(() => clearTimeout(timer));
}

/** Repeats `check` until it succeeds; after the timeout, fails with the last error. */
export async function eventually(what, check, timeoutMs = TIMEOUT_MS) {
  const deadline = Date.now() + timeoutMs;
  for (;;) {
    try {
      return await check();
    } catch (error) {
      if (Date.now() > deadline) throw new Error(`timeout: ${what}`, { cause: error });
    }
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

/** Waits until the machine serves the shell and its apps are ready. */
export async function waitUntilReady() {
  const authorization = `Bearer ${await mintSession()}`;
  await eventually("the shell and its apps", async () => {
    assert.equal((await get("/", { authorization })).status, 200);
    const { apps } = JSON.parse((await get("/api/apps", { authorization })).body);
    const bundled = apps.filter(({ slug }) => ["notes", "tasks"].includes(slug));
    assert.deepEqual(bundled.map(({ slug, status }) => [slug, status]), [["notes", "ready"], ["tasks", "ready"]]);
  });
}

/** Sends a request to the router as the owner, without a browser. */
export async function requestAsOwner(path, headers = {}, method = "GET") {
  return get(path, { authorization: `Bearer ${await mintSession()}`, ...headers }, method);
}

/** Sends a request without a session. */
export async function requestWithoutSession(path, headers = {}) {
  return get(path, headers);
}

function get(path, headers, method = "GET") {
  return new Promise((resolve, reject) => {
    const options = { method, headers: { host: stack.appHost, ...headers }, timeout: TIMEOUT_MS };
    const outgoing = request(stack.routerUrl + path, options, (response) => {
      const parts = [];
      response.on("data", (part) => parts.push(part));
      response.on("end", () => resolve({ status: response.statusCode, headers: response.headers, body: Buffer.concat(parts).toString() }));
    });
    outgoing.on("timeout", () => outgoing.destroy(new Error(`${path}: no response`)));
    outgoing.on("error", reject).end();
  });
}

export async function screenshot(page, name) {
  await page.screenshot({ path: join(process.env.SVC_SCREENSHOTS, `${name}.png`) });
}

/** Asserts that only the router's hosts were contacted, and that the retired route `/api/canvas` was not used. */
export function assertOnlyOwnHosts(seen) {
  const hosts = new Set(seen.requests.filter((url) => /^(https?|wss?):/.test(url)).map((url) => new URL(url).hostname));
  hosts.delete(stack.appHost);
  hosts.delete(stack.codeHost);
  assert.deepEqual([...hosts], []);
  assert.deepEqual(seen.requests.filter((url) => url.includes("/api/canvas")), []);
}

/** Checks basic accessibility inside any frame: names for screen readers, tab order, ids, width and contrast. */
export async function assertAccessible(frame) {
  const faults = await frame.evaluate(() => {
    const faults = [];
    const isVisible = (element) => element.checkVisibility({ checkOpacity: false });
    const accessibleName = (element) =>
      element.getAttribute("aria-label") ||
      element.getAttribute("aria-labelledby")?.split(" ").map((id) => document.getElementById(id)?.textContent).join("") ||
      [...(element.labels ?? [])].map((label) => label.textContent).join("") ||
      element.textContent.trim();
    for (const element of document.querySelectorAll("button, a[href], input, textarea, select, iframe, [tabindex]")) {
      if (isVisible(element) && !accessibleName(element)?.trim() && !element.title) faults.push(`no name: ${element.outerHTML.slice(0, 120)}`);
    }
    for (const image of document.querySelectorAll("img")) {
      if (!image.hasAttribute("alt")) faults.push(`no alt: ${image.outerHTML}`);
    }
    for (const element of document.querySelectorAll("[tabindex]")) {
      if (element.tabIndex > 0) faults.push(`tab order: ${element.outerHTML.slice(0, 120)}`);
    }
    for (const element of document.querySelectorAll("[aria-labelledby], [aria-describedby], label[for]")) {
      for (const id of (element.getAttribute("aria-labelledby") ?? element.getAttribute("aria-describedby") ?? element.htmlFor).split(" ")) {
        if (!document.getElementById(id)) faults.push(`missing element: ${id}`);
      }
    }
    const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
    for (const id of ids.filter((id, at) => ids.indexOf(id) !== at)) faults.push(`duplicate id: #${id}`);
    if (!document.documentElement.lang) faults.push("no language");
    if (!document.title) faults.push("no title");
    const { scrollWidth, clientWidth } = document.documentElement;
    if (scrollWidth > clientWidth) faults.push(`wider than the window: ${scrollWidth} > ${clientWidth}`);

    // Contrast of text on plain backgrounds, WCAG 2.2 AA.
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const luminance = (colour) => {
      const [r, g, b] = colour.map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const background = (element) => {
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
      const [back, front] = [background(element), rgba(style.color)];
      if (!back || front[3] < 255) continue;
      const [one, two] = [luminance(front.slice(0, 3)), luminance(back.slice(0, 3))];
      const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
      const isLarge = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 700);
      if (ratio < (isLarge ? 3 : 4.5)) faults.push(`contrast ${ratio.toFixed(2)}: ${walker.currentNode.textContent.trim().slice(0, 40)}`);
    }
    return faults;
  });
  assert.deepEqual(faults, []);
}
