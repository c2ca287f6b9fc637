// The shell through the router: who may see it, what it shows, how its canvas moves.

import assert from "node:assert/strict";
import { after, before } from "node:test";
import { app, asOwner, browser, end, isAccessible, ready, shot, stack, stayedHome, test, until, visitor } from "./support.mjs";

let chrome;
before(async () => {
  await ready();
  chrome = await browser();
});
after(() => end(chrome));

async function shell(options) {
  const visit = await visitor(chrome, options);
  await visit.page.goto(app);
  await visit.page.getByRole("link", { name: "Tasks" }).waitFor();
  return visit;
}

const place = (page) => page.locator("#world").evaluate((world) => new DOMMatrix(getComputedStyle(world).transform).toFloat64Array().join());
const scale = (page) => page.locator("#world").evaluate((world) => new DOMMatrix(getComputedStyle(world).transform).a);

test("whoever is not signed in is led to the identity provider", async () => {
  const { page, context, seen } = await visitor(chrome, { signedIn: false });
  // The stand-in of a provider has no page to show.
  await page.goto(app).catch(() => undefined);
  const [first, second] = seen.requests;
  assert.deepEqual([first, second?.startsWith(`${stack.idp.issuer}/sign-in`)], [`${app}/`, true]);
  await context.close();
});

test("the shell shows whose computer it is and an icon for each app, and asks nobody else", async () => {
  const { page, context, seen } = await shell();
  await page.getByText("ada", { exact: true }).waitFor();
  await page.getByRole("link", { name: "Slot primary" }).waitFor();
  for (const name of ["notes", "tasks"]) {
    const image = page.locator(`img[src="/icons/${name}"]`);
    await until(`the icon of ${name}`, async () => assert.ok(await image.evaluate((image) => image.naturalWidth > 0)));
  }
  // Looked at again, nothing is asked for a second time.
  const looks = () => seen.requests.filter((url) => url.endsWith("/api/apps")).length;
  const first = looks();
  await page.evaluate(() => document.dispatchEvent(new Event("visibilitychange")));
  await until("another look", () => assert.ok(looks() > first));
  for (const name of ["notes", "tasks"]) {
    assert.equal(seen.requests.filter((url) => url.endsWith(`/icons/${name}`)).length, 1, name);
  }
  stayedHome(seen);
  assert.deepEqual(seen.complaints, []);
  await isAccessible(page);
  await shot(page, "shell-light");
  await context.close();
});

test("dark and on a small screen, it reads as well", async () => {
  for (const [name, options] of [
    ["shell-dark", { colorScheme: "dark" }],
    ["shell-small", { viewport: { width: 390, height: 800 }, hasTouch: true }],
  ]) {
    const { page, context } = await shell(options);
    await isAccessible(page);
    await shot(page, name);
    await context.close();
  }
});

test("pointer, wheel and pinch move the canvas from its surface alone", async () => {
  const { page, context } = await shell();
  const icon = await page.getByRole("link", { name: "Notes" }).boundingBox();
  const [onIcon, onSurface] = [[icon.x + icon.width / 2, icon.y + icon.height / 2], [200, 600]];
  const drag = async ([x, y]) => {
    await page.mouse.move(x, y);
    await page.mouse.down();
    await page.mouse.move(x + 60, y + 40, { steps: 4 });
    await page.mouse.up();
  };
  const wheel = async ([x, y], control) => {
    await page.mouse.move(x, y);
    if (control) await page.keyboard.down("Control");
    await page.mouse.wheel(0, -100);
    if (control) await page.keyboard.up("Control");
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  };
  const start = await place(page);
  await drag(onIcon);
  await wheel(onIcon, false);
  await wheel(onIcon, true);
  assert.equal(await place(page), start, "what begins on an icon is the icon's");
  assert.equal(new URL(page.url()).hash, "", "and a drag opens nothing");
  await wheel([page.viewportSize().width - 60, page.viewportSize().height - 35], true);
  assert.equal(await place(page), start, "nor from the buttons");

  await drag(onSurface);
  const dragged = await place(page);
  assert.notEqual(dragged, start);
  await wheel(onSurface, false);
  const wheeled = await place(page);
  assert.notEqual(wheeled, dragged);
  assert.equal(await scale(page), 1);
  await wheel(onSurface, true);
  assert.ok((await scale(page)) > 1, "a wheel with the control key zooms");

  const before = await scale(page);
  const touch = await context.newCDPSession(page);
  const points = (apart) => [{ x: 300 - apart, y: 650, id: 0 }, { x: 300 + apart, y: 650, id: 1 }];
  await touch.send("Input.dispatchTouchEvent", { type: "touchStart", touchPoints: points(40) });
  for (const apart of [50, 60, 80]) {
    await touch.send("Input.dispatchTouchEvent", { type: "touchMove", touchPoints: points(apart) });
  }
  await touch.send("Input.dispatchTouchEvent", { type: "touchEnd", touchPoints: [] });
  await until("the pinch", async () => assert.ok((await scale(page)) > before * 1.2));
  await context.close();
});

test("keys move the canvas, zoom it, and open an app and leave it again", async () => {
  const { page, context, seen } = await shell();
  await page.keyboard.press("Tab");
  assert.equal(await page.evaluate(() => document.activeElement.id), "surface");
  const start = await place(page);
  await page.keyboard.press("ArrowLeft");
  assert.notEqual(await place(page), start);
  await page.keyboard.press("+");
  assert.ok((await scale(page)) > 1);
  await page.keyboard.press("0");
  assert.equal(await place(page), start);

  await page.keyboard.press("Tab");
  await page.keyboard.press("Enter");
  await page.waitForURL("**/#/apps/notes");
  const app = page.frameLocator("#frame").frameLocator("#app");
  await app.getByRole("heading", { name: "Notes" }).waitFor();
  await shot(page, "shell-app");
  await page.getByRole("button", { name: "All apps", exact: true }).press("Enter");
  await page.locator("#panel").waitFor({ state: "hidden" });
  assert.match(await page.evaluate(() => document.activeElement.textContent), /Notes/, "the focus is back where it was");
  await page.evaluate(() => history.back());
  await app.getByRole("heading", { name: "Notes" }).waitFor();
  stayedHome(seen);
  await context.close();
});

test("an icon that does not come has a stable stand-in and is not asked for again", async () => {
  const { page, context, seen } = await visitor(chrome);
  let asked = 0;
  await page.route("**/icons/tasks", (route) => {
    asked += 1;
    return route.fulfill({ status: 503 });
  });
  await page.goto(app);
  await page.locator(".tile", { hasText: "T" }).waitFor();
  const looks = () => seen.requests.filter((url) => url.endsWith("/api/apps")).length;
  for (let look = 0; look < 4; look += 1) {
    const before = looks();
    // A look that is still under way is not doubled: it is told again until there is a new one.
    await until("another look", async () => {
      await page.evaluate(() => document.dispatchEvent(new Event("visibilitychange")));
      assert.ok(looks() > before);
    });
  }
  assert.equal(asked, 1);
  await shot(page, "shell-icon-missing");
  await context.close();
});

test("a computer that cannot be reached is said, with a way to try again", async () => {
  const { page, context } = await visitor(chrome);
  await page.route("**/api/apps", (route) => route.abort());
  await page.goto(app);
  await page.getByText("Your computer cannot be reached.").waitFor();
  await page.unroute("**/api/apps");
  await page.getByRole("button", { name: "Try again" }).click();
  await page.getByRole("link", { name: "Notes" }).waitFor();
  await page.getByText("Your computer cannot be reached.").waitFor({ state: "hidden" });
  await context.close();
});

test("signing out ends the session on the platform", async () => {
  const { page, context } = await shell();
  const answer = page.waitForResponse("**/_svc/sign-out");
  await page.getByRole("button", { name: "Sign out" }).click();
  assert.equal((await answer).status(), 204);
  await context.close();
});

test("the shell's files are tagged, kept, and nowhere else", async () => {
  const page = await asOwner("/");
  assert.match(page.headers["content-security-policy"], /default-src 'none'/);
  assert.equal(page.headers["cache-control"], "private, no-cache");
  assert.equal((await asOwner("/", { "if-none-match": page.headers.etag })).status, 304);
  const script = /src="(\/assets\/[^"]+\.js)"/.exec(page.body)[1];
  const head = await asOwner(script, { "accept-encoding": "gzip" }, "HEAD");
  assert.deepEqual([head.status, head.body, head.headers["content-encoding"]], [200, "", "gzip"]);
  assert.match(head.headers["cache-control"], /immutable/);
  assert.equal((await asOwner("/some/page")).body, page.body, "its own paths are its page");
  for (const path of ["/missing.js", "/..%2f..%2fetc/passwd.txt", "/assets/%2e%2e/%2e%2e/release.json"]) {
    const answer = await asOwner(path);
    assert.ok([400, 404].includes(answer.status), `${path}: ${answer.status}`);
  }
});
