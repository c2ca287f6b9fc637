// The real code-server through the router, on its own host: the editor and the terminal, both over WebSockets.

import assert from "node:assert/strict";
import { existsSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before } from "node:test";
import {
  closeBrowser, code, eventually, launchBrowser, openEditor, openTerminal, requestWithoutSession, screenshot, stack,
  test, TIMEOUT_MS,
} from "./support.mjs";

// code-server is a 600 MB program, and the machine may be busy.
const START_TIMEOUT_MS = 6 * TIMEOUT_MS;
const findHome = () => {
  const hosts = join(stack.dir, "hosts");
  const homes = readdirSync(hosts).map((host) => join(hosts, host, "home/svc/home"));
  return homes.find((home) => existsSync(home));
};

let chrome;
before(async () => {
  chrome = await launchBrowser();
});
after(() => closeBrowser(chrome));

test("a file is opened, edited and saved", async () => {
  const file = join(findHome(), "hello.txt");
  writeFileSync(file, "before\n");
  const { page, context, sockets } = await openEditor(chrome, { file, timeoutMs: START_TIMEOUT_MS });
  await page.locator(".view-lines", { hasText: "before" }).waitFor();
  await page.locator(".editor-instance .view-lines").click();
  await page.keyboard.press("Control+End");
  await page.keyboard.type("typed in a browser");
  await page.keyboard.press("Control+s");
  await eventually("the file on disk", () => assert.equal(readFileSync(file, "utf8"), "before\ntyped in a browser"));
  assert.ok(sockets.length > 0 && sockets.every((url) => new URL(url).hostname === stack.codeHost), sockets.join());
  await screenshot(page, "code-editor");
  await context.close();
});

test("the terminal runs a command without secrets in its environment", async () => {
  const { page, context } = await openEditor(chrome, { timeoutMs: START_TIMEOUT_MS });
  await openTerminal(page, TIMEOUT_MS);
  const out = join(findHome(), "terminal.txt");
  await page.keyboard.type(`echo "$((6*7)) $(whoami)" > ${out}; env >> ${out}; echo done >> ${out}\n`);
  await eventually("the output of the command", () => assert.match(readFileSync(out, "utf8"), /^done$/m));
  const output = readFileSync(out, "utf8");
  assert.match(output, /^42 /);
  for (const name of ["DATABASE_URL", "UPGRADE_TOKEN", "SVC_ROOT", "NOTIFY_SOCKET", "PASSWORD"]) {
    assert.doesNotMatch(output, new RegExp(`^${name}=`, "m"));
  }
  await screenshot(page, "code-terminal");
  await context.close();
});

test("a visitor without a session cannot open the editor", async () => {
  const host = new URL(code).host;
  assert.equal((await requestWithoutSession("/", { host })).status, 401);
  const page = await requestWithoutSession("/", { host, accept: "text/html" });
  assert.ok([302, 303, 307].includes(page.status), String(page.status));
  assert.equal(page.body, "");
});
