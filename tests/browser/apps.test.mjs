// Notes and tasks: keyboard only, in two tabs, and with a failing connection.

import assert from "node:assert/strict";
import { after, afterEach, before } from "node:test";
import { app, assertAccessible, assertOnlyOwnHosts, closeBrowser, eventually, launchBrowser, newVisitor, screenshot, test, waitUntilReady } from "./support.mjs";

let chrome;
let visits = [];
before(async () => {
  await waitUntilReady();
  chrome = await launchBrowser();
});
after(() => closeBrowser(chrome));
afterEach(async () => {
  await Promise.all(visits.map(({ context }) => context.close()));
  visits = [];
});

/** Opens an app's page inside the router's frame. */
async function open(slug, options = {}) {
  const visit = await newVisitor(chrome, options);
  visits.push(visit);
  return { ...visit, ...(await openApp(visit.page, slug)) };
}

async function openApp(page, slug) {
  await page.goto(`${app}/apps/${slug}/`);
  const inside = page.frameLocator("#app");
  await inside.getByText("Live", { exact: true }).waitFor();
  const frame = page.frames().find((frame) => frame.url().includes(`/apps/${slug}/~`));
  return { page, inside, frame };
}

/** Moves the focus into a page with Tab. */
async function tabInto(page, frame, selector) {
  for (let step = 0; step < 30; step += 1) {
    if (await frame.evaluate((selector) => document.activeElement?.matches(selector), selector)) return;
    await page.keyboard.press("Tab");
  }
  assert.fail(`Tab does not reach ${selector}`);
}

const waitUntilSaved = (inside) => inside.getByText("Saved", { exact: true }).waitFor();
const uniqueTitle = (word) => `${word} ${Math.random().toString(36).slice(2, 8)}`;

test("a note is created, synced to another tab, edited and deleted with the keyboard", async () => {
  const { page, inside, frame, context, seen } = await open("notes");
  const other = await openApp(await context.newPage(), "notes");
  const name = uniqueTitle("Milk");
  await page.bringToFront();
  await tabInto(page, frame, "#new");
  await page.keyboard.press("n");
  await page.keyboard.type(name);
  await page.keyboard.press("Enter");
  await page.keyboard.type("two litres\nand bread");
  await waitUntilSaved(inside);
  const otherNote = other.inside.getByRole("button", { name });
  await otherNote.waitFor();

  // The edit appears in the other tab without a reload.
  await otherNote.click();
  await page.bringToFront();
  await page.keyboard.type(", and butter");
  await waitUntilSaved(inside);
  await eventually("the edit in the other tab", async () =>
    assert.match(await other.inside.getByLabel("Text").inputValue(), /butter$/));

  await page.reload();
  await inside.getByRole("button", { name }).waitFor();
  const reloadedFrame = page.frames().find((frame) => frame.url().includes("/apps/notes/~"));
  await tabInto(page, reloadedFrame, "#new");
  await page.keyboard.press("/");
  await page.keyboard.type(name);
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  assert.equal(await inside.getByLabel("Text").inputValue(), "two litres\nand bread, and butter");
  await page.keyboard.press("Escape");
  await page.keyboard.press("Delete");
  await inside.getByText("Deleted “").waitFor();
  await otherNote.waitFor({ state: "detached" });
  assertOnlyOwnHosts(seen);
  assert.deepEqual(seen.errors, []);
});

test("undo restores a deleted note, and a pinned note stays on top", async () => {
  const { page, inside } = await open("notes");
  const [first, second] = [uniqueTitle("First"), uniqueTitle("Second")];
  for (const title of [first, second]) {
    await inside.getByRole("button", { name: "New" }).click();
    await page.keyboard.type(title);
    await waitUntilSaved(inside);
  }
  await inside.getByRole("button", { name: first }).click();
  await inside.getByRole("button", { name: "Pin to the top" }).click();
  await waitUntilSaved(inside);
  const top = () => inside.getByRole("listitem").first().textContent();
  await eventually("the pinned note on top", async () => assert.match(await top(), new RegExp(first)));
  await inside.getByRole("button", { name: "Delete this note" }).click();
  await inside.getByRole("button", { name: "Undo" }).click();
  await eventually("the restored note", async () => assert.match(await top(), new RegExp(first)));
  await page.reload();
  await inside.getByRole("button", { name: first }).waitFor();
  await assertAccessible(page.frames().find((frame) => frame.url().includes("/apps/notes/~")));
});

test("an unsaved note is kept, reported, and saved later", async () => {
  const { page, inside } = await open("notes");
  const name = uniqueTitle("Unsaved");
  await page.route("**/api/bridge/query", (route) => route.abort());
  await inside.getByRole("button", { name: "New" }).click();
  await page.keyboard.type(name);
  await inside.getByText("Not saved yet: ").waitFor();
  await screenshot(page, "notes-failed");
  assert.equal(await inside.getByLabel("Title").inputValue(), name);
  await page.unroute("**/api/bridge/query");
  await inside.getByRole("button", { name: "Try again" }).click();
  await waitUntilSaved(inside);
  await page.reload();
  await inside.getByRole("button", { name }).waitFor();
});

test("concurrent changes of a note keep both versions", async () => {
  const { page, inside, context } = await open("notes");
  const other = await openApp(await context.newPage(), "notes");
  const name = uniqueTitle("Shared");
  await page.bringToFront();
  await inside.getByRole("button", { name: "New" }).click();
  await page.keyboard.type(name);
  await page.keyboard.press("Enter");
  await waitUntilSaved(inside);
  await other.inside.getByRole("button", { name }).click();
  // Each tab writes before it has received the other's version.
  await page.route("**/api/bridge/query", (route) => route.abort());
  await inside.getByLabel("Text").fill("here");
  await inside.getByText("Not saved yet: ").waitFor();
  await other.inside.getByLabel("Text").fill("there");
  await waitUntilSaved(other.inside);
  await page.unroute("**/api/bridge/query");
  await inside.getByRole("button", { name: "Try again" }).click();
  await inside.getByText("Both versions are kept").waitFor();
  await other.inside.getByRole("button", { name: `${name} (your version)` }).click();
  assert.equal(await other.inside.getByLabel("Text").inputValue(), "here");
  await other.inside.getByRole("button", { name: new RegExp(`^${name}(?! \\(your)`) }).click();
  assert.equal(await other.inside.getByLabel("Text").inputValue(), "there");
});

test("a task is added, done, renamed and deleted with the keyboard, and synced to another tab", async () => {
  const { page, inside, frame, context, seen } = await open("tasks");
  const other = await openApp(await context.newPage(), "tasks");
  const [name, renamed] = [uniqueTitle("Call"), uniqueTitle("Write to")];
  await page.bringToFront();
  await tabInto(page, frame, "#title");
  await page.keyboard.type(name);
  await page.keyboard.press("Enter");
  const otherCheckbox = (title) => other.inside.getByRole("checkbox", { name: `Done: ${title}` });
  await otherCheckbox(name).waitFor();

  await page.keyboard.press("ArrowDown");
  const focused = () => frame.evaluate(() => document.activeElement.getAttribute("aria-label"));
  while ((await focused()) !== `Done: ${name}`) await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  await page.keyboard.type(renamed);
  await page.keyboard.press("Enter");
  await otherCheckbox(renamed).waitFor();
  await page.keyboard.press("Space");
  await other.inside.getByRole("radio", { name: "Done" }).check({ force: true });
  await eventually("done in the other tab", async () => assert.ok(await otherCheckbox(renamed).isChecked()));

  await page.reload();
  await inside.getByText("Live", { exact: true }).waitFor();
  await inside.getByRole("radio", { name: "Done" }).check({ force: true });
  const task = inside.getByRole("checkbox", { name: `Done: ${renamed}` });
  assert.ok(await task.isChecked());
  await task.press("Delete");
  await inside.getByText("Deleted “").waitFor();
  await otherCheckbox(renamed).waitFor({ state: "detached" });
  assertOnlyOwnHosts(seen);
  assert.deepEqual(seen.errors, []);
});

test("unsaved tasks are marked, kept, and saved later", async () => {
  const { page, inside } = await open("tasks");
  const name = uniqueTitle("Offline");
  await page.route("**/api/bridge/query", (route) => route.fulfill({ status: 503, contentType: "application/problem+json",
    headers: { "access-control-allow-origin": "null" }, body: '{"code":"database_unavailable","detail":"The database is unavailable."}' }));
  await inside.getByLabel("New task").fill(name);
  await page.keyboard.press("Enter");
  await inside.getByText("Not saved yet: The database is unavailable.").waitFor();
  await inside.getByText("Not saved", { exact: true }).waitFor();
  await page.unroute("**/api/bridge/query");
  await inside.getByRole("button", { name: "Try again" }).click();
  await inside.getByText("Not saved", { exact: true }).waitFor({ state: "hidden" });
  await page.reload();
  await inside.getByRole("checkbox", { name: `Done: ${name}` }).waitFor();
});

test("both apps are readable in light and dark mode and on a small screen", async () => {
  for (const [slug, add] of [
    ["notes", async (page, inside) => {
      for (const [title, body] of [
        ["Groceries", "Milk, bread, olives\n\nAsk about the cheese."],
        ["Ideas for the garden", "Tomatoes along the wall. Lavender where it is dry."],
        ["Reading list", "The Mezzanine\nInvisible Cities"],
      ]) {
        await inside.getByRole("button", { name: "New" }).click();
        await inside.getByLabel("Title").fill(title);
        await inside.getByLabel("Text").fill(body);
        await waitUntilSaved(inside);
      }
    }],
    ["tasks", async (page, inside) => {
      for (const [title, due] of [["Send the invoice", "2020-01-31"], ["Book the train", "2031-05-04"], ["Water the plants", ""]]) {
        await inside.getByLabel("New task").fill(title);
        await inside.getByLabel("Due date").first().fill(due);
        await inside.getByRole("button", { name: "Add" }).click();
      }
      await inside.getByRole("checkbox", { name: "Done: Water the plants" }).first().check();
    }],
  ]) {
    for (const [appearance, options] of [
      ["light", {}],
      ["dark", { colorScheme: "dark" }],
      ["small", { viewport: { width: 390, height: 760 } }],
    ]) {
      const { page, inside, frame } = await open(slug, options);
      if (appearance === "light") await add(page, inside);
      await eventually("the rows of the app", async () => assert.ok((await inside.getByRole("listitem").count()) >= 2));
      await assertAccessible(frame);
      await screenshot(page, `${slug}-${appearance}`);
    }
  }
});
