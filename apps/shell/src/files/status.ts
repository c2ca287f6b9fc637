// The state of the backup: whether everything is saved, what needs attention, and what is excluded.

import { el } from "../../../shared/ui";
import { type BackupState, type Exclusions, fetchBackupState } from "./api";
import { verbatim } from "./elements";
import { formatAge, formatBytes, formatCount, formatMoment } from "./format";
import { Loader } from "./loader";

const REFRESH_INTERVAL_MS = 5_000;
const RETRY_INTERVAL_MS = 15_000;
/** Even without changes, `savedUntil` advances every few minutes. */
const MAX_SAVE_AGE_MS = 40 * 60_000;

interface Summary {
  kind: "saved" | "pending" | "problem";
  text: string;
  /** Continues the text. It is not announced to screen readers, because it changes too often. */
  detail?: string;
}

function summarize({ savedUntil, changedSince, pendingBytes, error, damage }: BackupState): Summary {
  if (!savedUntil) return { kind: error ? "problem" : "pending", text: "Nothing has been saved yet" };
  const isStale = Date.now() - Date.parse(savedUntil) > MAX_SAVE_AGE_MS;
  if (error || isStale) {
    return { kind: "problem", text: `Changes since ${formatMoment(changedSince ?? savedUntil)} are not saved` };
  }
  if (damage) return { kind: "problem", text: "A check has found damage in the backup" };
  if (changedSince) {
    const detail = pendingBytes ? `: ${formatBytes(pendingBytes)}` : "";
    return { kind: "pending", text: `Changes since ${formatMoment(changedSince)} are not saved yet`, detail };
  }
  return { kind: "saved", text: "Everything is saved", detail: `, as of ${formatAge(savedUntil)}` };
}

function listWarnings(state: BackupState): HTMLLIElement[] {
  const warnings: HTMLLIElement[] = [];
  const warn = (...content: (Node | string)[]) => warnings.push(el("li", {}, ...content));
  if (state.error) warn("The last save failed: ", verbatim(state.error));
  if (state.damage) warn("A check has found damage in the backup: ", verbatim(state.damage));
  if (state.unreadable > 0) {
    const example = state.firstUnreadable ? [" (first: ", verbatim(state.firstUnreadable), ")"] : [];
    warn(`${formatCount(state.unreadable, "entry", "entries")} could not be read`, ...example);
  }
  if (state.unstable > 0) {
    const files = formatCount(state.unstable, "file");
    warn(`${files} changed while being read, and may have been saved in the middle of a write`);
  }
  for (const rule of state.invalidRules) warn("Ignored an invalid line in .svcignore: ", verbatim(rule));
  return warnings;
}

function listFacts({ files, bytes, verifiedAt, drilledAt }: BackupState): HTMLElement[] {
  const fact = (term: string, text: string) => el("div", {}, el("dt", {}, term), el("dd", {}, text));
  return [
    fact("Saved", `${formatCount(files, "file")}, ${formatBytes(bytes)}`),
    fact("Backup verified", verifiedAt ? formatMoment(verifiedAt) : "not yet"),
    fact("Sample restored and compared", drilledAt ? formatMoment(drilledAt) : "not yet"),
  ];
}

function summarizeExclusions(excluded: Exclusions | null): string {
  if (!excluded) return "Excluded: not measured yet";
  const entries = formatCount(excluded.entries, "file or directory", "files and directories");
  return `Excluded: ${excluded.complete ? "" : "at least "}${entries}, ${formatBytes(excluded.bytes)}`;
}

function describeExclusions(excluded: Exclusions | null): HTMLElement[] {
  const code = (text: string) => el("code", {}, text);
  const rules = el("p", {},
    "The backup excludes directories named ", code("node_modules"), ", ", code(".cache"), " or ", code("__pycache__"),
    ", directories with a ", code("CACHEDIR.TAG"), ", and everything that the file ", code(".svcignore"),
    " in your home directory lists. A line such as ", code("!node_modules/"),
    " in this file includes such directories again.",
  );
  if (!excluded || excluded.largest.length === 0) return [rules];
  const largest = [...excluded.largest].sort((a, b) => b.bytes - a.bytes).map(({ path, entries, bytes }) =>
    el("li", {}, verbatim(path), el("span", {}, `${formatCount(entries, "entry", "entries")}, ${formatBytes(bytes)}`)));
  const measured = el("p", {}, `The largest, as measured at ${formatMoment(excluded.measuredAt)}:`);
  return [rules, measured, el("ul", { className: "largest" }, ...largest)];
}

export class BackupStatus {
  private readonly headline = el("strong", { role: "status" });
  private readonly detail = el("span");
  private readonly facts = el("dl");
  private readonly warnings = el("ul", { className: "warnings" });
  private readonly exclusionSummary = el("summary");
  private readonly exclusionDetails = el("div");
  private readonly content = el("div", { hidden: true },
    el("p", { className: "headline" }, this.headline, this.detail),
    this.warnings,
    this.facts,
    el("details", {}, this.exclusionSummary, this.exclusionDetails),
  );
  private readonly loader = new Loader();
  readonly element = el("section", { className: "status", "aria-label": "State of the backup" },
    this.content, this.loader.element);
  private timer = 0;
  private isStarted = false;
  /** The last rendered state, as JSON, without the fields that only the headline shows. */
  private renderedState = "";

  constructor() {
    document.addEventListener("visibilitychange", () => void this.refresh());
  }

  /** Shows the state, and refreshes it until `stop` is called. */
  start(): void {
    this.isStarted = true;
    void this.refresh();
  }

  stop(): void {
    this.isStarted = false;
    clearTimeout(this.timer);
    this.loader.cancel();
  }

  private async refresh(): Promise<void> {
    clearTimeout(this.timer);
    if (!this.isStarted || document.hidden) return;
    const progressText = this.renderedState ? "" : "Loading…";
    const isLoaded = await this.loader.run(fetchBackupState, (state) => this.render(state), { progressText });
    if (isLoaded === null) return;
    // The displayed state may be stale.
    if (!isLoaded) this.content.hidden = true;
    this.timer = window.setTimeout(() => void this.refresh(), isLoaded ? REFRESH_INTERVAL_MS : RETRY_INTERVAL_MS);
  }

  private render(state: BackupState): void {
    const { kind, text, detail = "" } = summarize(state);
    this.content.hidden = false;
    this.element.dataset.kind = kind;
    // Screen readers announce each assignment, even of the same text.
    if (this.headline.textContent !== text) this.headline.textContent = text;
    this.detail.textContent = detail;
    // Everything below the headline is replaced only if it has changed, so that a text selection is not lost.
    const newState = JSON.stringify({ ...state, savedUntil: null, changedSince: null, pendingBytes: null });
    if (newState === this.renderedState) return;
    this.renderedState = newState;
    this.facts.replaceChildren(...listFacts(state));
    this.warnings.replaceChildren(...listWarnings(state));
    this.exclusionSummary.textContent = summarizeExclusions(state.excluded);
    this.exclusionDetails.replaceChildren(...describeExclusions(state.excluded));
  }
}
