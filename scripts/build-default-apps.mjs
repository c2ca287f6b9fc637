// Builds the first-party apps and the shell, as a host bundle has them:
//
//   DIR/apps/<slug>/{svc.json, <icon>, dist/}   DIR/shell/   DIR/packages/svc-bridge/
//
//   node scripts/build-default-apps.mjs --out DIR [--no-shell]
//
// Each is checked by the compiler and built by Vite with the packages of its own lock file (`npm ci`, without their
// install scripts). Nothing of the time or of this machine goes into the result: the same sources give the same bytes.

import { spawnSync } from "node:child_process";
import { createHash } from "node:crypto";
import { cpSync, existsSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

const KEY = "NEXT_PUBLIC_IDP_PUBLISHABLE_KEY";
const SHELL = "shell";
const SHARED = "shared";
const INSTALL_MS = 300_000;
const BUILD_MS = 180_000;

const root = resolve(dirname(fileURLToPath(import.meta.url)), "..");
const sources = join(root, "apps");

function fail(why) {
  console.error(`build-default-apps: ${why}`);
  process.exit(1);
}

function run(command, args, cwd, timeout, more = {}) {
  // Of the caller's environment only what programs need to run and npm to reach its registry.
  const passed = /^(PATH|HOME|TMPDIR|SystemRoot|https?_proxy|no_proxy|npm_config_.*|NODE_EXTRA_CA_CERTS|SSL_CERT_FILE)$/i;
  const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => passed.test(name)));
  const settled = { NODE_ENV: "production", TZ: "UTC", LC_ALL: "C", CI: "1", ...more };
  const done = spawnSync(command, args, { cwd, timeout, encoding: "utf8", env: { ...env, ...settled } });
  if (done.error) fail(`${command} ${args[0]} in ${cwd}: ${done.error.message}`);
  if (done.status !== 0) fail(`${command} ${args.join(" ")} in ${cwd} ended with ${done.status ?? done.signal}\n${done.stdout}${done.stderr}`);
}

/** The packages of the lock file; those that are there from it already stay. */
function install(dir) {
  const lock = createHash("sha256").update(readFileSync(join(dir, "package-lock.json"))).digest("hex");
  const stamp = join(dir, "node_modules/.svc-lock");
  if (existsSync(stamp) && readFileSync(stamp, "utf8") === lock) return;
  const args = ["ci", "--ignore-scripts", "--include=dev", "--no-audit", "--no-fund", "--loglevel=error"];
  run("npm", args, dir, INSTALL_MS);
  writeFileSync(stamp, lock);
}

function build(name, to, env) {
  const dir = join(sources, name);
  install(dir);
  const tool = (path, args, more) => run(process.execPath, [join(dir, "node_modules", path), ...args], dir, BUILD_MS, more);
  tool("typescript/bin/tsc", ["--noEmit", "--project", "."]);
  rmSync(to, { recursive: true, force: true });
  tool("vite/bin/vite.js", ["build", "--outDir", to, "--emptyOutDir"], env);
}

function app(name, out) {
  const dir = join(sources, name);
  const manifest = JSON.parse(readFileSync(join(dir, "svc.json"), "utf8"));
  const to = join(out, "apps", manifest.slug);
  mkdirSync(to, { recursive: true });
  build(name, join(to, manifest.build.output), {});
  for (const file of ["svc.json", manifest.icon].filter(Boolean)) cpSync(join(dir, file), join(to, file));
  return `${manifest.slug} ${manifest.version}`;
}

function shell(out) {
  const key = process.env[KEY] ?? "";
  if (key === "") {
    fail(
      `${KEY} is not set, and is baked into the shell: without it browsers would ask a placeholder identity provider.\n` +
        "Set it to the publishable key of your identity provider (pk_test_… or pk_live_…), or build without a shell (--no-shell).",
    );
  }
  build(SHELL, join(out, SHELL), { [KEY]: key });
  return `${SHELL} ${JSON.parse(readFileSync(join(sources, SHELL, "package.json"), "utf8")).version}`;
}

function shared(out) {
  const to = join(out, "packages/svc-bridge");
  cpSync(join(sources, SHARED), to, { recursive: true });
}

const { values } = parseArgs({ options: { out: { type: "string" }, "no-shell": { type: "boolean", default: false } } });
if (!values.out) fail("--out DIR is missing");
const out = resolve(values.out);
// What an earlier build left is not part of this one.
for (const part of ["apps", SHELL, "packages"]) rmSync(join(out, part), { recursive: true, force: true });
mkdirSync(out, { recursive: true });
const built = [];
if (!values["no-shell"]) built.push(shell(out));
const names = readdirSync(sources).filter((name) => existsSync(join(sources, name, "svc.json"))).sort();
for (const name of names) built.push(app(name, out));
shared(out);
console.log(`built ${built.join(", ")} in ${out}`);
