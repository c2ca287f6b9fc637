// The router's own pages: Chromium derives the `Origin` of a submitted form from the policies of its page.

import assert from "node:assert/strict";
import { after, before } from "node:test";
import {
  app, closeBrowser, code, launchBrowser, mintSession, newVisitor, screenshot, stack, test, waitUntilReady,
} from "./support.mjs";

let chrome;
before(async () => {
  await waitUntilReady();
  chrome = await launchBrowser();
});
after(() => closeBrowser(chrome));

/** Opens a session of the owner on the app host, and then signs in another user at the identity provider. */
async function newVisitorWithTwoAccounts() {
  const visitor = await newVisitor(chrome, { signedIn: false });
  const signIn = async (user) => {
    await visitor.context.addCookies([{ name: "__session", value: await mintSession(user), url: app }]);
  };
  await signIn(stack.owner.idpUserId);
  await visitor.page.goto(app);
  await visitor.page.getByRole("link", { name: "Notes" }).waitFor();
  await signIn("user_without_computer");
  return visitor;
}

/** Submits a form with one of its buttons, and asserts that the router accepts it. */
async function submitForm(page, button) {
  const response = page.waitForResponse((response) => response.request().method() === "POST");
  await button.click();
  assert.equal((await response).status(), 303);
}

test("the slot page's form chooses a slot", async () => {
  const { page, context } = await newVisitor(chrome);
  await page.goto(`${app}/_svc/slots`);
  await screenshot(page, "router-slots");
  await submitForm(page, page.locator("button[value=primary]"));
  await page.getByRole("link", { name: "Notes" }).waitFor();
  await context.close();
});

test("the account page's form keeps the session's account", async () => {
  const { page, context } = await newVisitorWithTwoAccounts();
  assert.equal((await page.goto(app)).status(), 409);
  await screenshot(page, "router-account");
  await submitForm(page, page.getByRole("button", { name: "Continue as ada" }));
  await page.getByRole("link", { name: "Notes" }).waitFor();
  assert.equal((await page.goto(app)).status(), 200, "the choice is remembered");
  await context.close();
});

test("the account page's form switches to the identity provider's account", async () => {
  const { page, context } = await newVisitorWithTwoAccounts();
  assert.equal((await page.goto(app)).status(), 409);
  await submitForm(page, page.getByRole("button", { name: "Switch to an account without a computer" }));
  await page.getByRole("heading", { name: "You have no computer yet" }).waitFor();
  await context.close();
});

test("the account page's form continues to the editor's host", async () => {
  const { page, context } = await newVisitorWithTwoAccounts();
  assert.equal((await page.goto(code)).status(), 409);
  assert.equal(new URL(page.url()).origin, app);
  await submitForm(page, page.getByRole("button", { name: "Continue as ada" }));
  // The bundle of these tests has no editor, so its page is not awaited.
  await page.waitForURL((url) => url.origin === code, { waitUntil: "commit" });
  await context.close();
});
