// Runs one request at a time, and shows its progress or its error.

import { el } from "../../../shared/ui";
import { RequestError, SignedOutError } from "../http";

interface LoadOptions {
  /** The message during the request. If it is empty, the current message, such as an earlier error, stays. */
  progressText?: string;
}

export class Loader {
  private readonly message = el("p", { role: "status" });
  private readonly action = el("button", { type: "button", className: "link", hidden: true });
  readonly element = el("div", { className: "loader" }, this.message, this.action);
  private controller = new AbortController();

  /**
   * Calls `load`, then `show` with its result. A newer call, or `cancel`, cancels this one: `show` is then not called,
   * so that a stale response never replaces a newer one. Returns whether it succeeded; `null` if it was cancelled.
   */
  async run<T>(
    load: (signal: AbortSignal) => Promise<T>,
    show: (result: T) => void,
    options: LoadOptions = {},
  ): Promise<boolean | null> {
    this.controller.abort();
    const { signal } = (this.controller = new AbortController());
    const { progressText = "Loading…" } = options;
    if (progressText) this.render(progressText);
    try {
      const result = await load(signal);
      if (signal.aborted) return null;
      this.clear();
      show(result);
      return true;
    } catch (error) {
      if (signal.aborted) return null;
      this.showError(error, () => void this.run(load, show));
      return false;
    }
  }

  /** Cancels the request in progress, and clears the message. */
  cancel(): void {
    this.controller.abort();
    this.clear();
  }

  private showError(error: unknown, retry: () => void): void {
    if (error instanceof SignedOutError) {
      // The router redirects page loads without a session to the sign-in page.
      this.render(error.message, "Sign in", () => location.assign("/"));
    } else if (error instanceof RequestError) {
      this.render(error.message, error.isRetryable ? "Try again" : "", retry);
    } else {
      console.error(error);
      this.render("The response could not be shown.", "Try again", retry);
    }
    this.element.dataset.kind = "error";
  }

  private render(text: string, actionLabel = "", onAction?: () => void): void {
    delete this.element.dataset.kind;
    // Screen readers announce each assignment, even of the same text.
    if (this.message.textContent !== text) this.message.textContent = text;
    this.action.textContent = actionLabel;
    this.action.onclick = onAction ?? null;
    this.action.hidden = !actionLabel;
  }

  // An empty message stays in the page: screen readers may ignore text in an element that was hidden.
  private clear(): void {
    this.render("");
  }
}
