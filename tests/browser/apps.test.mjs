// Notes and tasks: keyboard only, in two tabs, and with a failing connection.

import assert from "node:assert/strict";
import { after, afterEach, before } from "node:test";
import {
  app, assertAccessible, assertOnlyOwnHosts, closeBrowser, eventually, launchBrowser, newVisitor, screenshot, test,
  waitUntilReady,
} from "./support.mjs";

let chrome;
let visitors = [];
before(async () => {
  await waitUntilReady();
  chrome = await launchBrowser();
});
after(() => closeBrowser(chrome));
afterEach(async () => {
  await Promise.all(visitors.map(({ context }) => context.close()));
  visitors = [];
});

/** Opens an app in a new browser context. */
async function openInNewContext(slug, options = {}) {
  const visitor = await newVisitor(chrome, options);
  visitors.push(visitor);
  return { ...visitor, ...(await openApp(visitor.page, slug)) };
}

const findAppFrame = (page, slug) => page.frames().find((frame) => frame.url().includes(`/apps/${slug}/~`));

/** Opens an app's page inside the router's frame: returns the frame, and a locator for its content as `ui`. */
async function openApp(page, slug) {
  await page.goto(`${app}/apps/${slug}/`);
  const ui = page.frameLocator("#app");
  await ui.getByText("Live", { exact: true }).waitFor();
  const frame = findAppFrame(page, slug);
  return { page, ui, frame };
}

/** Presses Tab until an element that matches `selector` has the focus. */
async function tabInto(page, frame, selector) {
  for (let step = 0; step < 30; step += 1) {
    if (await frame.evaluate((selector) => document.activeElement?.matches(selector), selector)) return;
    await page.keyboard.press("Tab");
  }
  assert.fail(`Tab does not reach ${selector}`);
}

const waitUntilSaved = (ui) => ui.getByText("Saved", { exact: true }).waitFor();
const databaseUnavailable = {
  status: 503,
  contentType: "application/problem+json",
  headers: { "access-control-allow-origin": "null" },
  body: '{"code":"database_unavailable","detail":"The database is unavailable."}',
};

/** Runs in the app's page: delays the response with the whole list until `window.releaseList()` is called. */
function holdListResponse() {
  const { fetch } = window;
  window.fetch = async (input, init) => {
    const response = await fetch(input, init);
    const { action, filter } = typeof init?.body === "string" ? JSON.parse(init.body) : {};
    if (action === "find" && !filter) await new Promise((resolve) => (window.releaseList = resolve));
    return response;
  };
}

const uniqueTitle = (word) => `${word} ${Math.random().toString(36).slice(2, 8)}`;

test("a note is created, synced to another tab, edited and deleted with the keyboard", async () => {
  const { page, ui, frame, context, activity } = await openInNewContext("notes");
  const otherTab = await openApp(await context.newPage(), "notes");
  const name = uniqueTitle("Milk");
  await page.bringToFront();
  await tabInto(page, frame, "#new");
  await page.keyboard.press("n");
  await page.keyboard.type(name);
  await page.keyboard.press("Enter");
  await page.keyboard.type("two litres\nand bread");
  await waitUntilSaved(ui);
  const otherNote = otherTab.ui.getByRole("button", { name });
  await otherNote.waitFor();

  // The edit appears in the other tab without a reload.
  await otherNote.click();
  await page.bringToFront();
  await page.keyboard.type(", and butter");
  await waitUntilSaved(ui);
  await eventually("the edit in the other tab", async () =>
    assert.match(await otherTab.ui.getByLabel("Text").inputValue(), /butter$/));

  await page.reload();
  await ui.getByRole("button", { name }).waitFor();
  const reloadedFrame = findAppFrame(page, "notes");
  await tabInto(page, reloadedFrame, "#new");
  await page.keyboard.press("/");
  await page.keyboard.type(name);
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  assert.equal(await ui.getByLabel("Text").inputValue(), "two litres\nand bread, and butter");
  await page.keyboard.press("Escape");
  await page.keyboard.press("Delete");
  await ui.getByText("Deleted “").waitFor();
  await otherNote.waitFor({ state: "detached" });
  assertOnlyOwnHosts(activity);
  assert.deepEqual(activity.errors, []);
});

test("undo restores a deleted note, and a pinned note stays on top", async () => {
  const { page, ui } = await openInNewContext("notes");
  const [first, second] = [uniqueTitle("First"), uniqueTitle("Second")];
  for (const title of [first, second]) {
    await ui.getByRole("button", { name: "New" }).click();
    await page.keyboard.type(title);
    await waitUntilSaved(ui);
  }
  await ui.getByRole("button", { name: first }).click();
  await ui.getByRole("button", { name: "Pin to the top" }).click();
  await waitUntilSaved(ui);
  const top = () => ui.getByRole("listitem").first().textContent();
  await eventually("the pinned note on top", async () => assert.match(await top(), new RegExp(first)));
  await ui.getByRole("button", { name: "Delete this note" }).click();
  await ui.getByRole("button", { name: "Undo" }).click();
  await eventually("the restored note", async () => assert.match(await top(), new RegExp(first)));
  await page.reload();
  await ui.getByRole("button", { name: first }).waitFor();
  await assertAccessible(findAppFrame(page, "notes"));
});

test("an unsaved note is kept, reported, and saved later", async () => {
  const { page, ui } = await openInNewContext("notes");
  const name = uniqueTitle("Unsaved");
  await page.route("**/api/bridge/query", (route) => route.abort());
  await ui.getByRole("button", { name: "New" }).click();
  await page.keyboard.type(name);
  await ui.getByText("Not saved yet: ").waitFor();
  await screenshot(page, "notes-failed");
  assert.equal(await ui.getByLabel("Title").inputValue(), name);
  await page.unroute("**/api/bridge/query");
  await ui.getByRole("button", { name: "Try again" }).click();
  await waitUntilSaved(ui);
  await page.reload();
  await ui.getByRole("button", { name }).waitFor();
});

test("a note that is created while the list is loading is kept", async () => {
  const { page, ui } = await openInNewContext("notes");
  const [earlier, name] = [uniqueTitle("Earlier"), uniqueTitle("Early")];
  await ui.getByRole("button", { name: "New" }).click();
  await page.keyboard.type(earlier);
  await waitUntilSaved(ui);
  // The list is read before the new note is inserted; its response arrives afterwards.
  await page.addInitScript(holdListResponse);
  await page.reload();
  await eventually("the read of the list", async () =>
    assert.ok(await findAppFrame(page, "notes").evaluate(() => "releaseList" in window)));
  await ui.getByRole("button", { name: "New" }).click();
  await page.keyboard.type(name);
  await waitUntilSaved(ui);
  await findAppFrame(page, "notes").evaluate(() => window.releaseList());
  await ui.getByRole("button", { name: earlier }).waitFor();
  assert.equal(await ui.getByRole("button", { name }).count(), 1);
});

test("concurrent changes to a note keep both versions", async () => {
  const { page, ui, context } = await openInNewContext("notes");
  const otherTab = await openApp(await context.newPage(), "notes");
  const name = uniqueTitle("Shared");
  await page.bringToFront();
  await ui.getByRole("button", { name: "New" }).click();
  await page.keyboard.type(name);
  await page.keyboard.press("Enter");
  await waitUntilSaved(ui);
  await otherTab.ui.getByRole("button", { name }).click();
  // Each tab writes before it has received the other's version.
  await page.route("**/api/bridge/query", (route) => route.abort());
  await ui.getByLabel("Text").fill("here");
  await ui.getByText("Not saved yet: ").waitFor();
  await otherTab.ui.getByLabel("Text").fill("there");
  await waitUntilSaved(otherTab.ui);
  await page.unroute("**/api/bridge/query");
  await ui.getByRole("button", { name: "Try again" }).click();
  await ui.getByText("Both versions are kept").waitFor();
  await otherTab.ui.getByRole("button", { name: `${name} (your version)` }).click();
  assert.equal(await otherTab.ui.getByLabel("Text").inputValue(), "here");
  await otherTab.ui.getByRole("button", { name: new RegExp(`^${name}(?! \\(your)`) }).click();
  assert.equal(await otherTab.ui.getByLabel("Text").inputValue(), "there");
});

test("a task is added, renamed, completed and deleted with the keyboard, and synced to another tab", async () => {
  const { page, ui, frame, context, activity } = await openInNewContext("tasks");
  const otherTab = await openApp(await context.newPage(), "tasks");
  const [name, renamed] = [uniqueTitle("Call"), uniqueTitle("Write to")];
  await page.bringToFront();
  await tabInto(page, frame, "#title");
  await page.keyboard.type(name);
  await page.keyboard.press("Enter");
  const otherCheckbox = (title) => otherTab.ui.getByRole("checkbox", { name: `Done: ${title}` });
  await otherCheckbox(name).waitFor();

  await page.keyboard.press("ArrowDown");
  const focused = () => frame.evaluate(() => document.activeElement.getAttribute("aria-label"));
  while ((await focused()) !== `Done: ${name}`) await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  await page.keyboard.type(renamed);
  await page.keyboard.press("Enter");
  await otherCheckbox(renamed).waitFor();
  await page.keyboard.press("Space");
  await otherTab.ui.getByRole("radio", { name: "Done" }).check({ force: true });
  await eventually("the task done in the other tab", async () => assert.ok(await otherCheckbox(renamed).isChecked()));

  await page.reload();
  await ui.getByText("Live", { exact: true }).waitFor();
  await ui.getByRole("radio", { name: "Done" }).check({ force: true });
  const task = ui.getByRole("checkbox", { name: `Done: ${renamed}` });
  assert.ok(await task.isChecked());
  await task.press("Delete");
  await ui.getByText("Deleted “").waitFor();
  await otherCheckbox(renamed).waitFor({ state: "detached" });
  assertOnlyOwnHosts(activity);
  assert.deepEqual(activity.errors, []);
});

test("unsaved tasks are marked, kept, and saved later", async () => {
  const { page, ui } = await openInNewContext("tasks");
  const name = uniqueTitle("Offline");
  await page.route("**/api/bridge/query", (route) => route.fulfill(databaseUnavailable));
  await ui.getByLabel("New task").fill(name);
  await page.keyboard.press("Enter");
  await ui.getByText("Not saved yet: The database is unavailable.").waitFor();
  await ui.getByText("Not saved", { exact: true }).waitFor();
  await page.unroute("**/api/bridge/query");
  await ui.getByRole("button", { name: "Try again" }).click();
  await ui.getByText("Not saved", { exact: true }).waitFor({ state: "hidden" });
  await page.reload();
  await ui.getByRole("checkbox", { name: `Done: ${name}` }).waitFor();
});

test("a task that could not be deleted is shown again, and the deletion can be repeated", async () => {
  const { page, ui } = await openInNewContext("tasks");
  const name = uniqueTitle("Undeletable");
  await ui.getByLabel("New task").fill(name);
  await page.keyboard.press("Enter");
  const task = ui.getByRole("checkbox", { name: `Done: ${name}` });
  await task.waitFor();
  await page.route("**/api/bridge/query", (route) => {
    const isDeletion = route.request().postDataJSON().action === "delete";
    return isDeletion ? route.fulfill(databaseUnavailable) : route.continue();
  });
  await task.press("Delete");
  await ui.getByText("Could not delete the task: The database is unavailable.").waitFor();
  await task.waitFor();
  await page.unroute("**/api/bridge/query");
  const deletion = page.waitForResponse((response) => response.request().postData()?.includes('"delete"'));
  await ui.getByRole("button", { name: "Try again" }).click();
  assert.equal((await deletion).status(), 200);
  await task.waitFor({ state: "detached" });
});

test("both apps are readable in light and dark mode and on a small screen", async () => {
  for (const [slug, addSamples] of [
    ["notes", async (page, ui) => {
      for (const [title, body] of [
        ["Groceries", "Milk, bread, olives\n\nAsk about the cheese."],
        ["Ideas for the garden", "Tomatoes along the wall. Lavender where it is dry."],
        ["Reading list", "The Mezzanine\nInvisible Cities"],
      ]) {
        await ui.getByRole("button", { name: "New" }).click();
        await ui.getByLabel("Title").fill(title);
        await ui.getByLabel("Text").fill(body);
        await waitUntilSaved(ui);
      }
    }],
    ["tasks", async (page, ui) => {
      for (const [title, due] of [
        ["Send the invoice", "2020-01-31"],
        ["Book the train", "2031-05-04"],
        ["Water the plants", ""],
      ]) {
        await ui.getByLabel("New task").fill(title);
        await ui.getByLabel("Due date").first().fill(due);
        await ui.getByRole("button", { name: "Add" }).click();
      }
      await ui.getByRole("checkbox", { name: "Done: Water the plants" }).first().check();
    }],
  ]) {
    for (const [appearance, options] of [
      ["light", {}],
      ["dark", { colorScheme: "dark" }],
      ["small", { viewport: { width: 390, height: 760 } }],
    ]) {
      const { page, ui, frame } = await openInNewContext(slug, options);
      if (appearance === "light") await addSamples(page, ui);
      await eventually("the rows of the app", async () => assert.ok((await ui.getByRole("listitem").count()) >= 2));
      await assertAccessible(frame);
      await screenshot(page, `${slug}-${appearance}`);
    }
  }
});
