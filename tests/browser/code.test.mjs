// The real code-server through the router, on its own host: the editor and the terminal, each over its WebSocket.

import assert from "node:assert/strict";
import { existsSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { after, before } from "node:test";
import { asNobody, browser, code, end, PATIENCE, shot, stack, test, until, visitor } from "./support.mjs";

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

async function editor(file) {
  const visit = await visitor(chrome);
  visit.context.setDefaultTimeout(START);
  const sockets = [];
  visit.page.on("websocket", (socket) => sockets.push(socket.url()));
  const where = file ? `?payload=${encodeURIComponent(JSON.stringify([["openFile", `vscode-remote://${new URL(code).host}${file}`]]))}` : "";
  await until("code-server behind the router", async () => {
    const answer = await visit.page.goto(code + "/" + where);
    assert.equal(answer.status(), 200);
  });
  await visit.page.locator(".monaco-workbench").waitFor();
  return { ...visit, sockets };
}

test("a file is opened, typed into and saved", async () => {
  const file = join(home(), "hello.txt");
  writeFileSync(file, "before\n");
  const { page, context, sockets } = await editor(file);
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
  const { page, context } = await editor();
  const command = page.locator(".quick-input-list .monaco-list-row", { hasText: "Terminal: Create New Terminal" }).first();
  await until("the command", async () => {
    // While its parts still start, the palette may be closed again.
    await page.keyboard.press("Escape");
    await page.keyboard.press("F1");
    await page.locator(".quick-input-widget input[type=text]").focus({ timeout: 2_000 });
    await page.keyboard.type("create new terminal");
    await command.click({ timeout: 5_000 });
  });
  await page.locator(".terminal-wrapper .xterm").waitFor();
  const out = join(home(), "terminal.txt");
  await page.locator(".xterm-helper-textarea").focus();
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
