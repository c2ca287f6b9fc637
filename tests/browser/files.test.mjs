// The view "Files": the state of the backup, earlier versions, restores, downloads, and the key.

import assert from "node:assert/strict";
import { mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before } from "node:test";
import {
  app, assertAccessible, assertOnlyOwnHosts, closeBrowser, eventually, launchBrowser, newVisitor, requestAsOwner,
  screenshot, stack, test, waitUntilReady,
} from "./support.mjs";

/** Longer than the interval between saves without changes, which also advance `savedUntil`. */
const SAVE_TIMEOUT_MS = 120_000;
const DIRECTORY = `letters-${Math.random().toString(36).slice(2, 8)}`;
const directory = join(stack.owner.home, DIRECTORY);
const FIRST = "Dear Grace,\nthis is the first draft.\n";
const SECOND = "Dear Grace,\nthis is the second draft, and it is longer.\n";

let chrome;
/** The time of a backup with the first draft. */
let firstSavedAt;
before(async () => {
  await waitUntilReady();
  mkdirSync(directory, { recursive: true });
  writeFileSync(join(directory, "letter.txt"), FIRST);
  writeFileSync(join(directory, "deleted.txt"), "to be deleted");
  await waitUntilSaved();
  firstSavedAt = JSON.parse((await requestAsOwner(`/api/files/at?path=${DIRECTORY}`)).body).savedAt;
  writeFileSync(join(directory, "letter.txt"), SECOND);
  rmSync(join(directory, "deleted.txt"));
  await waitUntilSaved();
  chrome = await launchBrowser();
});
after(() => closeBrowser(chrome));

/** Waits until everything written so far is saved. */
async function waitUntilSaved() {
  const now = Date.now();
  await eventually("the saved files", async () => {
    const { body } = await requestAsOwner("/api/files/status");
    assert.ok(Date.parse(JSON.parse(body).savedUntil) > now, body);
  }, SAVE_TIMEOUT_MS);
}

/** Opens the view, and returns its locator as `view`. */
async function openFiles(options) {
  const visitor = await newVisitor(chrome, options);
  await visitor.page.goto(app);
  await visitor.page.getByRole("button", { name: "Files" }).click();
  const view = visitor.page.getByRole("region", { name: "Files", exact: true });
  await view.waitFor();
  return { ...visitor, view };
}

/** Opens the view and navigates to the directory of these tests. */
async function openDirectory(options) {
  const visitor = await openFiles(options);
  await visitor.view.getByRole("button", { name: DIRECTORY }).click();
  return visitor;
}

const versionsIn = (view) => view.getByRole("list", { name: "Versions" }).getByRole("listitem");
/** Returns the newest version that has the size of a text. */
const versionOf = (view, text) => versionsIn(view).filter({ hasText: ` ${text.length} B,` }).first();

/** Clicks a link, and returns the name and the content of the downloaded file. */
async function download(page, link) {
  const [download] = await Promise.all([page.waitForEvent("download"), link.click()]);
  return { name: download.suggestedFilename(), content: readFileSync(await download.path()) };
}

const problem = (status, code, detail) => ({
  status,
  contentType: "application/problem+json",
  body: JSON.stringify({ title: "Error", status, code, detail }),
});

/** Returns a response to `GET /api/files/at` with entries of these names. */
function listing(names, nextCursor = null) {
  const modifiedAt = "2026-11-27T17:59:58.120Z";
  const entry = { name: "home", kind: "directory", sizeBytes: 0, mode: "0755", modifiedAt };
  const entries = names.map((name) => ({ ...entry, name, kind: "file", sizeBytes: 987 }));
  const savedAt = "2026-11-28T09:14:02.001Z";
  return { json: { path: "/home/svc/home", snapshot: "0", savedAt, entry, entries, nextCursor } };
}

test("the view shows the state of the backup, and Escape closes it", async () => {
  const { page, context, activity, view } = await openFiles();
  assert.equal(new URL(page.url()).hash, "#/files");
  await view.getByText("Everything is saved").waitFor({ timeout: SAVE_TIMEOUT_MS });
  await view.getByText("Excluded: ").waitFor();
  await view.getByRole("button", { name: DIRECTORY }).waitFor();
  assert.ok(await page.locator("#surface").evaluate((surface) => surface.inert), "the canvas is inert");
  await assertAccessible(page);
  await screenshot(page, "files-light");

  await page.keyboard.press("Escape");
  await view.waitFor({ state: "hidden" });
  assert.equal(await page.evaluate(() => document.activeElement.id), "show-files", "the focus has returned");
  assert.ok(!(await page.locator("#surface").evaluate((surface) => surface.inert)));
  await page.keyboard.press("Enter");
  await view.waitFor();
  await view.getByRole("button", { name: "All apps" }).click();
  await view.waitFor({ state: "hidden" });
  await page.evaluate(() => history.back());
  await view.waitFor();
  assertOnlyOwnHosts(activity);
  assert.deepEqual(activity.errors, []);
  await context.close();
});

test("an earlier version is downloaded, and restored next to the current one", async () => {
  const { page, context, activity, view } = await openDirectory();
  await view.getByRole("button", { name: "letter.txt" }).click();
  await versionOf(view, SECOND).waitFor();
  const first = versionOf(view, FIRST);
  const { name, content } = await download(page, first.getByRole("link", { name: "Download" }));
  assert.deepEqual([name, content.toString()], ["letter.txt", FIRST]);

  await first.getByRole("button", { name: "Restore" }).click();
  assert.ok(await view.getByRole("radio", { name: "Next to the current one" }).isChecked());
  await assertAccessible(page);
  await screenshot(page, "files-restore");
  await view.getByRole("button", { name: "Restore", exact: true }).click();
  await view.getByText("Restored to ").waitFor();
  const restored = readdirSync(directory).filter((name) => name.startsWith("letter.restored-"));
  assert.ok(restored.length > 0);
  for (const name of restored) assert.equal(readFileSync(join(directory, name), "utf8"), FIRST);
  assert.equal(readFileSync(join(directory, "letter.txt"), "utf8"), SECOND, "the current one is unchanged");
  assertOnlyOwnHosts(activity);
  assert.deepEqual(activity.errors, []);
  await context.close();
});

test("an earlier version replaces the current one, which is kept", async () => {
  const current = join(directory, "letter.txt");
  writeFileSync(current, "not saved yet");
  const { context, view } = await openDirectory();
  await view.getByRole("button", { name: "letter.txt" }).click();
  await versionOf(view, FIRST).getByRole("button", { name: "Restore" }).click();
  await view.getByRole("radio", { name: "Replace the current one" }).check();
  await view.getByRole("button", { name: "Restore", exact: true }).click();
  await view.getByText("The replaced one was kept as ").waitFor({ timeout: SAVE_TIMEOUT_MS });
  assert.equal(readFileSync(current, "utf8"), FIRST);
  const replaced = readdirSync(directory).filter((name) => name.startsWith("letter.replaced-"));
  assert.ok(replaced.some((name) => readFileSync(join(directory, name), "utf8") === "not saved yet"), replaced.join());
  writeFileSync(current, SECOND);
  await context.close();
});

test("a deleted file is listed at an earlier time, and its versions show when it did not exist", async () => {
  const { page, context, view } = await openDirectory();
  await view.getByRole("button", { name: "letter.txt" }).waitFor();
  const deleted = view.getByRole("button", { name: "deleted.txt" });
  assert.equal(await deleted.count(), 0);
  const localTime = await page.evaluate((time) => {
    const date = new Date(time);
    return new Date(date - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
  }, firstSavedAt);
  await view.getByLabel("As saved at or before").fill(localTime);
  await view.getByRole("button", { name: "Show", exact: true }).click();
  await deleted.click();
  await view.getByText("Did not exist").waitFor();
  const { content } = await download(page, view.getByRole("link", { name: "Download" }));
  assert.equal(content.toString(), "to be deleted");

  await view.getByRole("button", { name: "Back to the directory" }).click();
  await deleted.waitFor();
  await view.getByRole("button", { name: "Newest" }).click();
  await deleted.waitFor({ state: "detached" });
  await view.getByLabel("As saved at or before").fill("2001-02-03T04:05:06");
  await view.getByRole("button", { name: "Show", exact: true }).click();
  await view.getByText("does not contain this directory").waitFor();
  await context.close();
});

test("a directory is downloaded as a zip archive, and browsed at an earlier time", async () => {
  const { page, context, view } = await openDirectory();
  await view.getByRole("button", { name: "Versions of this directory" }).click();
  const oldest = versionsIn(view).last();
  await oldest.waitFor();
  const { name, content } = await download(page, oldest.getByRole("link", { name: "Download" }));
  assert.deepEqual([name, content.subarray(0, 2).toString()], [`${DIRECTORY}.zip`, "PK"]);
  await oldest.getByRole("button", { name: "Browse" }).click();
  await view.getByRole("button", { name: "deleted.txt" }).waitFor();
  await context.close();
});

test("the home directory itself can be restored only to another path inside it", async () => {
  const { context, view } = await openFiles();
  await view.getByRole("button", { name: "Versions of this directory" }).click();
  await view.getByRole("button", { name: /^Restore the version/ }).first().click();
  assert.equal(await view.getByRole("radio").count(), 1);
  await view.getByRole("textbox", { name: "Path" }).fill("../outside");
  await view.getByRole("button", { name: "Restore", exact: true }).click();
  await view.getByText("Invalid path: it must be").waitFor();
  await view.getByRole("button", { name: "Cancel" }).click();
  await view.getByRole("radio").waitFor({ state: "detached" });
  await context.close();
});

test("the key is fetched only on request, and hidden on close", async () => {
  const { page, context, activity, view } = await openFiles();
  await view.getByText("Everything is saved").waitFor({ timeout: SAVE_TIMEOUT_MS });
  const countRequests = () => activity.requests.filter((url) => url.includes("/api/files/key")).length;
  assert.equal(countRequests(), 0);
  await view.getByRole("button", { name: "Show the key" }).click();
  await view.getByText("restic restore latest --target ./mine").waitFor();
  assert.equal(countRequests(), 1);
  const password = view.locator("dd", { has: page.getByRole("button", { name: "Copy the password" }) }).locator("code");
  assert.match(await password.textContent(), /^[\w-]{43}$/);
  await view.getByRole("button", { name: "Copy the password" }).click();
  await view.getByText(/^Password (copied|selected)/).waitFor();
  await assertAccessible(page);
  await page.keyboard.press("Escape");
  await view.waitFor({ state: "hidden" });
  assert.equal(await password.count(), 0);
  await context.close();
});

test("a failed request is reported, with a retry button, and a late response is ignored", async () => {
  const { page, context } = await newVisitor(chrome);
  const view = page.getByRole("region", { name: "Files", exact: true });
  const unavailable = problem(503, "store_unavailable", "It cannot be read.");
  await page.route("**/api/files/at?*", (route) => route.fulfill(unavailable));
  await page.goto(`${app}/#/files`);
  await view.getByText("It cannot be read.").waitFor();
  await page.unroute("**/api/files/at?*");

  // The first response arrives after the second.
  let release;
  const released = new Promise((resolve) => (release = resolve));
  let requests = 0;
  await page.route("**/api/files/at?*", async (route) => {
    requests += 1;
    if (requests === 1) await released;
    await route.fulfill(listing([requests === 1 ? "late.txt" : "newest.txt"])).catch(() => undefined);
  });
  await view.getByRole("button", { name: "Try again" }).click();
  await view.getByRole("button", { name: "Newest" }).click();
  await view.getByRole("button", { name: "newest.txt" }).waitFor();
  release();
  await page.waitForTimeout(200);
  assert.equal(await view.getByRole("button", { name: "late.txt" }).count(), 0);
  await context.close();
});

test("a version that continues on the next page is listed once", async () => {
  const { page, context } = await newVisitor(chrome);
  const view = page.getByRole("region", { name: "Files", exact: true });
  const entry = { name: "a.txt", kind: "file", sizeBytes: 1, mode: "0644", modifiedAt: "2026-11-01T00:00:00Z" };
  const version = (first, last, sizeBytes) => ({
    firstSavedAt: `2026-11-${first}T12:00:00Z`,
    lastSavedAt: `2026-11-${last}T12:00:00Z`,
    snapshot: "0",
    entry: sizeBytes === null ? null : { ...entry, sizeBytes },
  });
  const nextBefore = "2026-11-16T12:00:00Z";
  const pages = new Map([
    [null, { versions: [version(20, 22, null), version(16, 18, 3)], nextBefore, damagedSnapshots: 2 }],
    [nextBefore, { versions: [version(10, 14, 3), version("05", "08", 2)], nextBefore: null, damagedSnapshots: 0 }],
  ]);
  await page.route("**/api/files/at?*", (route) => route.fulfill(listing(["a.txt"])));
  await page.route("**/api/files/versions?*", (route) => {
    const before = new URL(route.request().url()).searchParams.get("before");
    return route.fulfill({ json: { path: "", ...pages.get(before) } });
  });
  await page.goto(`${app}/#/files`);
  await view.getByRole("button", { name: "a.txt" }).click();
  await view.getByText("The newest 2 versions. 2 backups could not be searched.").waitFor();
  await view.getByRole("button", { name: "Show more" }).click();
  await view.getByText("3 versions.").waitFor();
  const texts = await versionsIn(view).allTextContents();
  assert.deepEqual(texts.map((text) => /Did not exist|\d B/.exec(text)[0]), ["Did not exist", "3 B", "2 B"]);
  const downloads = await versionsIn(view).getByRole("link").evaluateAll((links) => links.map((link) => link.href));
  const times = downloads.map((url) => new URL(url).searchParams.get("time"));
  assert.deepEqual(times, ["2026-11-18T12:00:00Z", "2026-11-08T12:00:00Z"]);
  await context.close();
});

test("a restore in progress is shown when the view is opened again, with its failure", async () => {
  const { page, context } = await newVisitor(chrome);
  const view = page.getByRole("region", { name: "Files", exact: true });
  const restore = {
    requestId: "1", status: "running", path: "/home/svc/home/a.txt", savedAt: null, restoredTo: null, keptAs: null,
    files: 1, totalBytes: 2048, writtenBytes: 1024, incomplete: 0, error: null,
  };
  await page.route("**/api/files/restore", (route) => route.fulfill({ json: { restore } }));
  await page.goto(`${app}/#/files`);
  await view.getByText("Restoring /home/svc/home/a.txt").waitFor();
  await view.getByText("1 KiB of 2 KiB").waitFor();
  await page.keyboard.press("Escape");
  await view.waitFor({ state: "hidden" });
  Object.assign(restore, { status: "failed", error: "the disk is full" });
  await page.getByRole("button", { name: "Files" }).click();
  await view.getByText("/home/svc/home/a.txt could not be restored: the disk is full.").waitFor();
  await view.getByRole("button", { name: "Dismiss" }).click();
  await view.getByText("could not be restored").waitFor({ state: "hidden" });
  await context.close();
});

test("a signed-out owner sees a button to sign in", async () => {
  const { page, context } = await newVisitor(chrome);
  await page.route("**/api/files/**", (route) => route.fulfill(problem(401, "unauthorized", "Sign in.")));
  await page.goto(`${app}/#/files`);
  await page.getByText("You are signed out.").first().waitFor();
  await page.getByRole("button", { name: "Sign in" }).first().waitFor();
  await context.close();
});

test("pages are appended, and any name fits on a small screen in light and dark mode", async () => {
  const names = ["x".repeat(255), "line\nbreak\ttab", "\u202etxt.exe", "a & b <i>#?%.txt", "  spaces  "];
  for (const [appearance, colorScheme] of [["small", "light"], ["dark", "dark"]]) {
    const { page, context } = await newVisitor(chrome, { viewport: { width: 360, height: 740 }, colorScheme });
    const view = page.getByRole("region", { name: "Files", exact: true });
    await page.route("**/api/files/at?*", (route) => {
      const cursor = new URL(route.request().url()).searchParams.get("cursor");
      return route.fulfill(cursor === "0" ? listing(names, names.length) : listing(["the last one"]));
    });
    const paths = [];
    await page.route("**/api/files/versions?*", (route) => {
      paths.push(new URL(route.request().url()).searchParams.get("path"));
      return route.fulfill({ json: { path: "", versions: [], nextBefore: null, damagedSnapshots: 0 } });
    });
    await page.goto(`${app}/#/files`);
    await view.getByRole("button", { name: "Show more" }).click();
    await view.getByRole("button", { name: "the last one" }).waitFor();
    assert.match(await page.evaluate(() => document.activeElement.textContent), /the last one/);
    assert.equal(await view.getByRole("button", { name: "Show more" }).count(), 0);
    await view.getByRole("button", { name: "line␊break␉tab" }).waitFor();
    await assertAccessible(page);
    const overflow = await view.locator(".scroller").evaluate((element) => element.scrollWidth - element.clientWidth);
    assert.equal(overflow, 0, "nothing is wider than the view");
    await screenshot(page, `files-${appearance}`);
    await view.getByRole("button", { name: "a & b <i>#?%.txt" }).click();
    await view.getByText("No version has been saved.").waitFor();
    assert.deepEqual(paths, ["/home/svc/home/a & b <i>#?%.txt"]);
    await context.close();
  }
});
