// Runs one command in a terminal of the real code-server, possibly on a slow machine; the lab's step `terminal` checks
// the result.

import { after, before, test } from "node:test";
import { closeBrowser, launchBrowser, openEditor, openTerminal, screenshot } from "./support.mjs";

// code-server is a 600 MB program, and the processor may be emulated.
const TIMEOUT_MS = 300_000;

let chrome;
before(async () => {
  chrome = await launchBrowser();
});
after(() => closeBrowser(chrome));

test("a terminal runs the command to completion", { timeout: 3 * TIMEOUT_MS }, async () => {
  const { page, context } = await openEditor(chrome, { timeoutMs: TIMEOUT_MS });
  await openTerminal(page, TIMEOUT_MS);
  // The terminal closes when the shell exits, which signals the end of the command.
  await page.keyboard.type(`${process.env.SVC_TERMINAL_COMMAND}; exit 0\n`);
  await screenshot(page, "terminal-typed");
  await page.locator(".terminal-wrapper .xterm").waitFor({ state: "detached" });
  await context.close();
});
