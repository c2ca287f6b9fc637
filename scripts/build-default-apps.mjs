// Builds the default apps and the shell in the layout of a host bundle:
//
//   DIR/apps/<slug>/{svc.json, <icon>, dist/}   DIR/shell/   DIR/packages/svc-bridge/
//
//   node scripts/build-default-apps.mjs --out DIR [--no-shell]
//
// Each is type-checked by tsc and built by Vite with the packages of its own lock file (`npm ci`, without their install
// scripts). The build is reproducible: the output contains no timestamps or machine paths, so the same sources give the
// same bytes.

import { spawnSync } from "node:child_process";
import { createHash } from "node:crypto";
import { cpSync, existsSync, mkdirSync, readFileSync, readdirSync, realpathSync, rmSync, writeFileSync } from "node:fs";
import { basename, dirname, join, resolve, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

const KEY_VAR = "NEXT_PUBLIC_IDP_PUBLISHABLE_KEY";
const SHELL = "shell";
const SHARED = "shared";
/** The directories in DIR, which are removed before a build. */
const OUTPUT_DIRS = ["apps", SHELL, "packages"];
const INSTALL_TIMEOUT_MS = 300_000;
const BUILD_TIMEOUT_MS = 180_000;

const root = resolve(dirname(fileURLToPath(import.meta.url)), "..");
const sources = join(root, "apps");

function fail(message) {
  console.error(`build-default-apps: ${message}`);
  process.exit(1);
}

function run(command, args, cwd, timeout, extraEnv = {}) {
  // Passes on only the environment variables that programs need to run and that npm needs to reach its registry.
  const allowed = /^(PATH|HOME|TMPDIR|SystemRoot|https?_proxy|no_proxy|npm_config_.*|NODE_EXTRA_CA_CERTS|SSL_CERT_FILE)$/i;
  const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => allowed.test(name)));
  const fixedEnv = { NODE_ENV: "production", TZ: "UTC", LC_ALL: "C", CI: "1", ...extraEnv };
  const result = spawnSync(command, args, { cwd, timeout, encoding: "utf8", env: { ...env, ...fixedEnv } });
  if (result.error) fail(`${command} ${args[0]} in ${cwd}: ${result.error.message}`);
  if (result.status !== 0) fail(`${command} ${args.join(" ")} in ${cwd} exited with ${result.status ?? result.signal}\n${result.stdout}${result.stderr}`);
}

/** Resolves the symbolic links of a path whose last parts may not exist yet. */
function resolveLinks(path) {
  return existsSync(path) ? realpathSync(path) : join(resolveLinks(dirname(path)), basename(path));
}

/** Refuses an output directory in which the build would overwrite or remove the sources. */
function checkOutputDir(out) {
  const isWithin = (path, dir) => `${path}${sep}`.startsWith(dir.endsWith(sep) ? dir : `${dir}${sep}`);
  const sourceDir = realpathSync(sources);
  for (const dir of OUTPUT_DIRS.map((name) => join(resolveLinks(out), name))) {
    if (isWithin(dir, sourceDir) || isWithin(sourceDir, dir)) {
      fail(`--out ${out}: the build replaces ${dir}, which overlaps the sources in ${sourceDir}; choose another directory, such as target/apps`);
    }
  }
}

/** Installs the packages of the lock file, unless they are already installed from it. */
function install(dir) {
  const lock = createHash("sha256").update(readFileSync(join(dir, "package-lock.json"))).digest("hex");
  const stamp = join(dir, "node_modules/.svc-lock");
  if (existsSync(stamp) && readFileSync(stamp, "utf8") === lock) return;
  const args = ["ci", "--ignore-scripts", "--include=dev", "--no-audit", "--no-fund", "--loglevel=error"];
  run("npm", args, dir, INSTALL_TIMEOUT_MS);
  writeFileSync(stamp, lock);
}

function build(name, outDir, extraEnv) {
  const dir = join(sources, name);
  install(dir);
  const runTool = (path, args, env) => run(process.execPath, [join(dir, "node_modules", path), ...args], dir, BUILD_TIMEOUT_MS, env);
  runTool("typescript/bin/tsc", ["--noEmit", "--project", "."]);
  rmSync(outDir, { recursive: true, force: true });
  runTool("vite/bin/vite.js", ["build", "--outDir", outDir, "--emptyOutDir"], extraEnv);
}

function buildApp(name, out) {
  const dir = join(sources, name);
  const manifest = JSON.parse(readFileSync(join(dir, "svc.json"), "utf8"));
  const appDir = join(out, "apps", manifest.slug);
  mkdirSync(appDir, { recursive: true });
  build(name, join(appDir, manifest.build.output), {});
  for (const file of ["svc.json", manifest.icon].filter(Boolean)) cpSync(join(dir, file), join(appDir, file));
  return `${manifest.slug} ${manifest.version}`;
}

function buildShell(out) {
  const key = process.env[KEY_VAR] ?? "";
  if (key === "") {
    fail(
      `${KEY_VAR} is not set. It is built into the shell; without it, browsers would be sent to a placeholder identity provider.\n` +
        "Set it to the publishable key of your identity provider (pk_test_… or pk_live_…), or build without a shell (--no-shell).",
    );
  }
  build(SHELL, join(out, SHELL), { [KEY_VAR]: key });
  return `${SHELL} ${JSON.parse(readFileSync(join(sources, SHELL, "package.json"), "utf8")).version}`;
}

function copySharedPackage(out) {
  const packageDir = join(out, "packages/svc-bridge");
  cpSync(join(sources, SHARED), packageDir, { recursive: true });
}

const { values } = parseArgs({ options: { out: { type: "string" }, "no-shell": { type: "boolean", default: false } } });
if (!values.out) fail("--out DIR is missing");
const out = resolve(values.out);
checkOutputDir(out);
// Remove the output of an earlier build.
for (const name of OUTPUT_DIRS) rmSync(join(out, name), { recursive: true, force: true });
mkdirSync(out, { recursive: true });
const built = [];
if (!values["no-shell"]) built.push(buildShell(out));
const names = readdirSync(sources).filter((name) => existsSync(join(sources, name, "svc.json"))).sort();
for (const name of names) built.push(buildApp(name, out));
copySharedPackage(out);
console.log(`built ${built.join(", ")} in ${out}`);
