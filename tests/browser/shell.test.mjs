// The shell through the router: access, content, and movement of the canvas.

import assert from "node:assert/strict";
import { after, before } from "node:test";
import {
  app, assertAccessible, assertOnlyOwnHosts, closeBrowser, eventually, launchBrowser, newVisitor, requestAsOwner,
  screenshot, stack, test, waitUntilReady,
} from "./support.mjs";

let chrome;
before(async () => {
  await waitUntilReady();
  chrome = await launchBrowser();
});
after(() => closeBrowser(chrome));

async function openShell(options) {
  const visitor = await newVisitor(chrome, options);
  await visitor.page.goto(app);
  await visitor.page.getByRole("link", { name: "Tasks" }).waitFor();
  return visitor;
}

const canvasTransform = (page) => page.locator("#world").evaluate((world) => getComputedStyle(world).transform);
const canvasScale = async (page) =>
  page.evaluate((transform) => new DOMMatrix(transform).a, await canvasTransform(page));

test("a visitor without a session is redirected to the identity provider", async () => {
  const { page, context, activity } = await newVisitor(chrome, { signedIn: false });
  // The identity provider of the tests has no sign-in page.
  await page.goto(app).catch(() => undefined);
  const [first, second] = activity.requests;
  assert.deepEqual([first, second?.startsWith(`${stack.idp.issuer}/sign-in`)], [`${app}/`, true]);
  await context.close();
});

test("the shell shows the owner and an icon per app, and contacts no other host", async () => {
  const { page, context, activity } = await openShell();
  await page.getByText("ada", { exact: true }).waitFor();
  await page.getByRole("link", { name: "Slot primary" }).waitFor();
  for (const name of ["notes", "tasks"]) {
    const image = page.locator(`img[src="/icons/${name}"]`);
    const isLoaded = () => image.evaluate((image) => image.naturalWidth > 0);
    await eventually(`the icon of ${name}`, async () => assert.ok(await isLoaded()));
  }
  // A refresh does not request the icons again.
  const countRefreshes = () => activity.requests.filter((url) => url.endsWith("/api/apps")).length;
  const first = countRefreshes();
  await page.evaluate(() => document.dispatchEvent(new Event("visibilitychange")));
  await eventually("another refresh", () => assert.ok(countRefreshes() > first));
  for (const name of ["notes", "tasks"]) {
    assert.equal(activity.requests.filter((url) => url.endsWith(`/icons/${name}`)).length, 1, name);
  }
  assertOnlyOwnHosts(activity);
  assert.deepEqual(activity.errors, []);
  await assertAccessible(page);
  await screenshot(page, "shell-light");
  await context.close();
});

test("the shell is readable in dark mode and on a small screen", async () => {
  for (const [name, options] of [
    ["shell-dark", { colorScheme: "dark" }],
    ["shell-small", { viewport: { width: 390, height: 800 }, hasTouch: true }],
  ]) {
    const { page, context } = await openShell(options);
    await assertAccessible(page);
    await screenshot(page, name);
    await context.close();
  }
});

test("pointer, wheel and pinch move the canvas only from its surface", async () => {
  const { page, context } = await openShell();
  const icon = await page.getByRole("link", { name: "Notes" }).boundingBox();
  const [onIcon, onSurface] = [[icon.x + icon.width / 2, icon.y + icon.height / 2], [200, 600]];
  const drag = async ([x, y]) => {
    await page.mouse.move(x, y);
    await page.mouse.down();
    await page.mouse.move(x + 60, y + 40, { steps: 4 });
    await page.mouse.up();
  };
  const wheel = async ([x, y], withControl) => {
    await page.mouse.move(x, y);
    if (withControl) await page.keyboard.down("Control");
    await page.mouse.wheel(0, -100);
    if (withControl) await page.keyboard.up("Control");
    await page.evaluate(() => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))));
  };
  const start = await canvasTransform(page);
  await drag(onIcon);
  await wheel(onIcon, false);
  await wheel(onIcon, true);
  assert.equal(await canvasTransform(page), start, "a gesture that starts on an icon does not move the canvas");
  assert.equal(new URL(page.url()).hash, "", "a drag opens nothing");
  await wheel([page.viewportSize().width - 60, page.viewportSize().height - 35], true);
  assert.equal(await canvasTransform(page), start, "a gesture on the buttons does not move the canvas");

  await drag(onSurface);
  const dragged = await canvasTransform(page);
  assert.notEqual(dragged, start);
  await wheel(onSurface, false);
  const wheeled = await canvasTransform(page);
  assert.notEqual(wheeled, dragged);
  assert.equal(await canvasScale(page), 1);
  await wheel(onSurface, true);
  assert.ok((await canvasScale(page)) > 1, "a wheel with the control key zooms");

  const before = await canvasScale(page);
  const devtools = await context.newCDPSession(page);
  const points = (radius) => [{ x: 300 - radius, y: 650, id: 0 }, { x: 300 + radius, y: 650, id: 1 }];
  await devtools.send("Input.dispatchTouchEvent", { type: "touchStart", touchPoints: points(40) });
  for (const radius of [50, 60, 80]) {
    await devtools.send("Input.dispatchTouchEvent", { type: "touchMove", touchPoints: points(radius) });
  }
  await devtools.send("Input.dispatchTouchEvent", { type: "touchEnd", touchPoints: [] });
  await eventually("the pinch", async () => assert.ok((await canvasScale(page)) > before * 1.2));
  await context.close();
});

test("keys move and zoom the canvas, and open and close an app", async () => {
  const { page, context, activity } = await openShell();
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.id), "surface");
  const start = await canvasTransform(page);
  await page.keyboard.press("ArrowLeft");
  assert.notEqual(await canvasTransform(page), start);
  await page.keyboard.press("+");
  assert.ok((await canvasScale(page)) > 1);
  await page.keyboard.press("0");
  assert.equal(await canvasTransform(page), start);

  await page.keyboard.press("Tab");
  await page.keyboard.press("Enter");
  await page.waitForURL("**/#/apps/notes");
  const app = page.frameLocator("#frame").frameLocator("#app");
  await app.getByRole("heading", { name: "Notes" }).waitFor();
  await screenshot(page, "shell-app");
  await page.getByRole("button", { name: "All apps", exact: true }).press("Enter");
  await page.locator("#panel").waitFor({ state: "hidden" });
  const focusedText = await page.evaluate(() => document.activeElement.textContent);
  assert.match(focusedText, /Notes/, "the focus has returned to the icon");
  await page.evaluate(() => history.back());
  await app.getByRole("heading", { name: "Notes" }).waitFor();
  assertOnlyOwnHosts(activity);
  await context.close();
});

test("a missing icon has a stable placeholder and is requested once", async () => {
  const { page, context, activity } = await newVisitor(chrome);
  let iconRequests = 0;
  await page.route("**/icons/tasks", (route) => {
    iconRequests += 1;
    return route.fulfill({ status: 503 });
  });
  await page.goto(app);
  await page.locator(".tile", { hasText: "T" }).waitFor();
  const countRefreshes = () => activity.requests.filter((url) => url.endsWith("/api/apps")).length;
  for (let refresh = 0; refresh < 4; refresh += 1) {
    const before = countRefreshes();
    // A refresh in progress is not repeated, so the event is sent until a new one starts.
    await eventually("another refresh", async () => {
      await page.evaluate(() => document.dispatchEvent(new Event("visibilitychange")));
      assert.ok(countRefreshes() > before);
    });
  }
  assert.equal(iconRequests, 1);
  await page.locator(".tile", { hasText: "T" }).waitFor();
  await screenshot(page, "shell-icon-missing");
  await context.close();
});

test("an unreachable computer is reported, with a retry button", async () => {
  const { page, context } = await newVisitor(chrome);
  await page.route("**/api/apps", (route) => route.abort());
  await page.goto(app);
  await page.getByText("Your computer cannot be reached.").waitFor();
  await page.unroute("**/api/apps");
  await page.getByRole("button", { name: "Try again" }).click();
  await page.getByRole("link", { name: "Notes" }).waitFor();
  await page.getByText("Your computer cannot be reached.").waitFor({ state: "hidden" });
  await context.close();
});

test("the sign-out button signs out on the platform", async () => {
  const { page, context } = await openShell();
  const response = page.waitForResponse("**/_svc/sign-out");
  await page.getByRole("button", { name: "Sign out" }).click();
  assert.equal((await response).status(), 204);
  await context.close();
});

test("the shell's files have ETags and caching headers, and no other files are served", async () => {
  const page = await requestAsOwner("/");
  assert.match(page.headers["content-security-policy"], /default-src 'none'/);
  assert.equal(page.headers["cache-control"], "private, no-cache");
  assert.equal((await requestAsOwner("/", { "if-none-match": page.headers.etag })).status, 304);
  const script = /src="(\/assets\/[^"]+\.js)"/.exec(page.body)[1];
  const head = await requestAsOwner(script, { "accept-encoding": "gzip" }, "HEAD");
  assert.deepEqual([head.status, head.body, head.headers["content-encoding"]], [200, "", "gzip"]);
  assert.match(head.headers["cache-control"], /immutable/);
  assert.equal((await requestAsOwner("/some/page")).body, page.body, "unknown paths return the page");
  for (const path of ["/missing.js", "/..%2f..%2fetc/passwd.txt", "/assets/%2e%2e/%2e%2e/release.json"]) {
    const response = await requestAsOwner(path);
    assert.ok([400, 404].includes(response.status), `${path}: ${response.status}`);
  }
});
