// The progress and the result of a restore, which continues on the machine while this page is closed.

import { el } from "../../../shared/ui";
import { SignedOutError } from "../http";
import { fetchRestore, type Restore } from "./api";
import { verbatim } from "./elements";
import { formatBytes, formatCount, formatTimestamp } from "./format";

const POLL_INTERVAL_MS = 1_000;
const RETRY_INTERVAL_MS = 3_000;

const hasEnded = ({ status }: Restore) => status === "done" || status === "failed";

export class RestoreProgress {
  private readonly message = el("p", { role: "status" });
  private readonly bar = el("progress", { "aria-label": "Restored", hidden: true });
  private readonly amount = el("span", { hidden: true });
  private readonly dismissButton = el("button", { type: "button", className: "link", hidden: true }, "Dismiss");
  readonly element = el("div", { className: "restore-progress", hidden: true },
    this.message, this.bar, this.amount, this.dismissButton);
  private isFollowing = false;

  constructor() {
    this.dismissButton.onclick = () => {
      this.element.hidden = true;
    };
  }

  /** Shows the restore that was requested earlier, if it is still in progress. */
  async resume(): Promise<void> {
    if (this.isFollowing) return;
    // If the request fails, nothing is shown here: the state of the backup (`status.ts`) shows the error.
    const restore = await fetchRestore().catch(() => null);
    if (restore && !hasEnded(restore)) this.follow();
  }

  /** Shows the restore in progress until it has ended. */
  follow(): void {
    if (this.isFollowing) return;
    this.isFollowing = true;
    this.element.dataset.kind = "";
    this.show("The restore has been requested.");
    void this.poll();
  }

  private async poll(): Promise<void> {
    let delay = POLL_INTERVAL_MS;
    try {
      const restore = await fetchRestore();
      if (restore) this.render(restore);
      if (!restore || hasEnded(restore)) return this.stop(restore?.status);
    } catch (error) {
      const reason = error instanceof Error ? error.message : String(error);
      this.show(`The restore continues, but its progress is unknown: ${reason}`);
      if (error instanceof SignedOutError) return this.stop();
      delay = RETRY_INTERVAL_MS;
    }
    window.setTimeout(() => void this.poll(), delay);
  }

  private stop(kind = ""): void {
    this.isFollowing = false;
    this.element.dataset.kind = kind;
    this.bar.hidden = this.amount.hidden = true;
    this.dismissButton.hidden = false;
  }

  private render(restore: Restore): void {
    const { writtenBytes, totalBytes } = restore;
    this.show(...describe(restore));
    this.bar.hidden = this.amount.hidden = totalBytes === 0;
    this.bar.max = Math.max(1, totalBytes);
    this.bar.value = writtenBytes;
    this.amount.textContent = `${formatBytes(writtenBytes)} of ${formatBytes(totalBytes)}`;
  }

  private show(...content: (Node | string)[]): void {
    const text = el("p", {}, ...content);
    // Screen readers announce each assignment, even of the same text.
    if (this.message.textContent !== text.textContent) this.message.replaceChildren(...text.childNodes);
    this.element.hidden = false;
    this.dismissButton.hidden = true;
  }
}

function describe({ status, path, savedAt, restoredTo, keptAs, incomplete, error }: Restore): (Node | string)[] {
  if (status === "failed") return [verbatim(path), ` could not be restored: ${error ?? "the reason is unknown"}.`];
  if (status !== "done") return ["Restoring ", verbatim(path), error ? `. Retrying after an error: ${error}.` : "…"];
  return [
    "Restored to ",
    verbatim(restoredTo ?? path),
    savedAt ? `, as saved at ${formatTimestamp(savedAt)}.` : ".",
    ...(keptAs ? [" The replaced one was kept as ", verbatim(keptAs), "."] : []),
    incomplete > 0 ? ` Not all attributes of ${formatCount(incomplete, "entry", "entries")} could be set.` : "",
    error ? ` However, ${error}.` : "",
  ];
}
