// The real code-server through the router, on its own host: the editor and the terminal, each over its WebSocket.

import assert from "node:assert/strict";
import { existsSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before } from "node:test";
import { asNobody, browser, code, editor, end, openTerminal, PATIENCE, shot, stack, test, until } from "./support.mjs";

// A 600 MB program on a machine that does other things, too.
const START = 6 * PATIENCE;
const home = () => {
  const hosts = join(stack.dir, "hosts");
  const homes = readdirSync(hosts).map((host) => join(hosts, host, "home/svc/home"));
  return homes.find((home) => existsSync(home));
};

let chrome;
before(async () => {
  chrome = await browser();
});
after(() => end(chrome));

test("a file is opened, typed into and saved", async () => {
  const file = join(home(), "hello.txt");
  writeFileSync(file, "before\n");
  const { page, context, sockets } = await editor(chrome, { file, patience: START });
  await page.locator(".view-lines", { hasText: "before" }).waitFor();
  await page.locator(".editor-instance .view-lines").click();
  await page.keyboard.press("Control+End");
  await page.keyboard.type("typed in a browser");
  await page.keyboard.press("Control+s");
  await until("the file on disk", () => assert.equal(readFileSync(file, "utf8"), "before\ntyped in a browser"));
  assert.ok(sockets.length > 0 && sockets.every((url) => new URL(url).hostname === stack.codeHost), sockets.join());
  await shot(page, "code-editor");
  await context.close();
});

test("the terminal runs a command, without our environment", async () => {
  const { page, context } = await editor(chrome, { patience: START });
  await openTerminal(page, PATIENCE);
  const out = join(home(), "terminal.txt");
  await page.keyboard.type(`echo "$((6*7)) $(whoami)" > ${out}; env >> ${out}; echo done >> ${out}\n`);
  await until("what the command wrote", () => assert.match(readFileSync(out, "utf8"), /^done$/m));
  const said = readFileSync(out, "utf8");
  assert.match(said, /^42 /);
  for (const name of ["DATABASE_URL", "UPGRADE_TOKEN", "SVC_ROOT", "NOTIFY_SOCKET", "PASSWORD"]) {
    assert.doesNotMatch(said, new RegExp(`^${name}=`, "m"));
  }
  await shot(page, "code-terminal");
  await context.close();
});

test("whoever is not signed in does not get to the editor", async () => {
  const host = new URL(code).host;
  assert.equal((await asNobody("/", { host })).status, 401);
  const page = await asNobody("/", { host, accept: "text/html" });
  assert.ok([302, 303, 307].includes(page.status), String(page.status));
  assert.equal(page.body, "");
});
