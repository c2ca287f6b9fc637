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
  const url = `${stack.idp.mintUrl}?sub=${user}&ttl=3600`;
  const response = await fetch(url, { signal: AbortSignal.timeout(TIMEOUT_MS) });
  assert.equal(response.status, 200);
  return response.text();
}

/** Opens a new browser context, signed in as the owner by default; records its requests and errors in `activity`. */
export async function newVisitor(chrome, { signedIn = true, ...options } = {}) {
  // A router with TLS uses a certificate of the tests' CA.
  const ignoreHTTPSErrors = protocol === "https:";
  const context = await chrome.newContext({ viewport: { width: 1200, height: 800 }, ignoreHTTPSErrors, ...options });
  context.setDefaultTimeout(TIMEOUT_MS);
  const activity = { requests: [], errors: [] };
  context.on("request", (request) => activity.requests.push(request.url()));
  context.on("console", (message) => {
    if (message.type() === "error") activity.errors.push(message.text());
  });
  context.on("weberror", (error) => activity.errors.push(String(error.error())));
  if (signedIn) {
    const value = await mintSession();
    await context.addCookies([app, code].map((url) => ({ name: "__session", value, url })));
  }
  return { context, activity, page: await context.newPage() };
}

/** Opens code-server's workbench through the router as the owner, with `file` open if it is given. */
export async function openEditor(chrome, { file, timeoutMs }) {
  const visitor = await newVisitor(chrome);
  visitor.context.setDefaultTimeout(timeoutMs);
  const sockets = [];
  visitor.page.on("websocket", (socket) => sockets.push(socket.url()));
  const payload = JSON.stringify([["openFile", `vscode-remote://${new URL(code).host}${file}`]]);
  const query = file ? `?payload=${encodeURIComponent(payload)}` : "";
  await eventually("code-server behind the router", async () => {
    const response = await visitor.page.goto(code + "/" + query);
    assert.equal(response.status(), 200);
  }, timeoutMs);
  await visitor.page.locator(".monaco-workbench").waitFor();
  return { ...visitor, sockets };
}

/** Opens a terminal in the workbench and focuses it. */
export async function openTerminal(page, timeoutMs) {
  const rows = page.locator(".quick-input-list .monaco-list-row");
  const command = rows.filter({ hasText: "Terminal: Create New Terminal" }).first();
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

/**
 * Retries a failed or hanging test once, and reports it: the browser shares two processors with everything under test.
 * At most two tests per file are retried.
 */
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
  const report = (error) => console.error(`closing the browser: ${error.message}`);
  await withTimeout(TIMEOUT_MS, chrome?.close()).catch(report);
}

function withTimeout(ms, work) {
  let timer;
  const timeout = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error(`timeout after ${ms} ms`)), ms);
  });
  return Promise.race([work, timeout]).finally(() => clearTimeout(timer));
}

/** Repeats `check` until it succeeds; after the timeout, fails with the last error. */
export async function eventually(description, check, timeoutMs = TIMEOUT_MS) {
  const deadline = Date.now() + timeoutMs;
  for (;;) {
    try {
      return await check();
    } catch (error) {
      if (Date.now() > deadline) throw new Error(`timed out waiting for ${description}`, { cause: error });
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
      const { statusCode: status, headers } = response;
      const chunks = [];
      response.on("data", (chunk) => chunks.push(chunk));
      response.on("end", () => resolve({ status, headers, body: Buffer.concat(chunks).toString() }));
    });
    outgoing.on("timeout", () => outgoing.destroy(new Error(`${path}: no response`)));
    outgoing.on("error", reject).end();
  });
}

export async function screenshot(page, name) {
  await page.screenshot({ path: join(process.env.SVC_SCREENSHOTS, `${name}.png`) });
}

/** Asserts that only the router's hosts were contacted, and that the retired route `/api/canvas` was not used. */
export function assertOnlyOwnHosts(activity) {
  const urls = activity.requests.filter((url) => /^(https?|wss?):/.test(url));
  const hosts = new Set(urls.map((url) => new URL(url).hostname));
  hosts.delete(stack.appHost);
  hosts.delete(stack.codeHost);
  assert.deepEqual([...hosts], []);
  assert.deepEqual(activity.requests.filter((url) => url.includes("/api/canvas")), []);
}

/**
 * Checks basic accessibility inside any frame: names for screen readers, alternative texts, tab order, ids, language,
 * title, width and contrast.
 */
export async function assertAccessible(frame) {
  const violations = await frame.evaluate(() => {
    const violations = [];
    const isVisible = (element) => element.checkVisibility({ checkOpacity: false });
    const textOfIds = (ids) => ids?.split(" ").map((id) => document.getElementById(id)?.textContent).join("");
    const accessibleName = (element) =>
      element.getAttribute("aria-label") ||
      textOfIds(element.getAttribute("aria-labelledby")) ||
      [...(element.labels ?? [])].map((label) => label.textContent).join("") ||
      element.textContent.trim();
    for (const element of document.querySelectorAll("button, a[href], input, textarea, select, iframe, [tabindex]")) {
      if (!isVisible(element) || accessibleName(element)?.trim() || element.title) continue;
      violations.push(`no name: ${element.outerHTML.slice(0, 120)}`);
    }
    for (const image of document.querySelectorAll("img")) {
      if (!image.hasAttribute("alt")) violations.push(`no alt: ${image.outerHTML}`);
    }
    for (const element of document.querySelectorAll("[tabindex]")) {
      if (element.tabIndex > 0) violations.push(`tab order: ${element.outerHTML.slice(0, 120)}`);
    }
    for (const element of document.querySelectorAll("[aria-labelledby], [aria-describedby], label[for]")) {
      const references =
        element.getAttribute("aria-labelledby") ?? element.getAttribute("aria-describedby") ?? element.htmlFor;
      for (const id of references.split(" ")) {
        if (!document.getElementById(id)) violations.push(`missing element: ${id}`);
      }
    }
    const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
    for (const id of ids.filter((id, index) => ids.indexOf(id) !== index)) violations.push(`duplicate id: #${id}`);
    if (!document.documentElement.lang) violations.push("no language");
    if (!document.title) violations.push("no title");
    const { scrollWidth, clientWidth } = document.documentElement;
    if (scrollWidth > clientWidth) violations.push(`wider than the window: ${scrollWidth} > ${clientWidth}`);

    // Contrast of text on plain backgrounds, WCAG 2.2 AA.
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (color) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const luminance = (color) => {
      const linearize = (channel) => (channel <= 0.04045 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4);
      const [r, g, b] = color.map((channel) => linearize(channel / 255));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    /** Returns `null` if a background is translucent. */
    const background = (element) => {
      for (let ancestor = element; ancestor; ancestor = ancestor.parentElement) {
        const color = rgba(getComputedStyle(ancestor).backgroundColor);
        if (color[3] === 255) return color;
        if (color[3] > 0) return null;
      }
      return rgba(getComputedStyle(document.documentElement).backgroundColor);
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      const text = walker.currentNode.textContent.trim();
      if (!text || !element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true })) continue;
      if (element.closest(".sr-only, noscript, script, style")) continue;
      const style = getComputedStyle(element);
      const [back, front] = [background(element), rgba(style.color)];
      if (!back || front[3] < 255) continue;
      const luminances = [luminance(front.slice(0, 3)), luminance(back.slice(0, 3))];
      const ratio = (Math.max(...luminances) + 0.05) / (Math.min(...luminances) + 0.05);
      const fontSize = parseFloat(style.fontSize);
      const isLarge = fontSize >= 24 || (fontSize >= 18.66 && Number(style.fontWeight) >= 700);
      if (ratio < (isLarge ? 3 : 4.5)) violations.push(`contrast ${ratio.toFixed(2)}: ${text.slice(0, 40)}`);
    }
    return violations;
  });
  assert.deepEqual(violations, []);
}
