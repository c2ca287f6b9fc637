// One command in a terminal of the real code-server, on a machine that may be slow: the lab's act `terminal` judges what it did.

import { after, before, test } from "node:test";
import { browser, editor, end, openTerminal, shot } from "./support.mjs";

// An emulated processor starts a program of 600 MB.
const PATIENCE = 300_000;

let chrome;
before(async () => {
  chrome = await browser();
});
after(() => end(chrome));

test("a terminal runs the command to its end", { timeout: 3 * PATIENCE }, async () => {
  const { page, context } = await editor(chrome, { patience: PATIENCE });
  await openTerminal(page, PATIENCE);
  // The shell's own end closes the terminal: this is how the end of the command is seen.
  await page.keyboard.type(`${process.env.SVC_TERMINAL_COMMAND}; exit 0\n`);
  await shot(page, "terminal-typed");
  await page.locator(".terminal-wrapper .xterm").waitFor({ state: "detached" });
  await context.close();
});
