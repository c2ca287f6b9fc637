// The "Files" view: the state of the backup, the file history, restores, and the key.

import { el } from "../../../shared/ui";
import "./files.css";
import { FileBrowser } from "./browser";
import { BackupKey } from "./key";
import { RestoreProgress } from "./restore-progress";
import { BackupStatus } from "./status";

export class FilesView {
  private readonly status = new BackupStatus();
  private readonly restoreProgress = new RestoreProgress();
  private readonly browser = new FileBrowser(() => this.restoreProgress.follow());
  private readonly key = new BackupKey();

  constructor(
    private readonly panel: HTMLElement,
    private readonly closeButton: HTMLElement,
  ) {
    const content = el("div", { className: "content" }, this.status.element, this.browser.element, this.key.element);
    panel.append(el("div", { className: "scroller" }, content), this.restoreProgress.element);
    // The listener is on the document, because the element that had the focus may have been removed.
    document.addEventListener("keydown", (event) => {
      if (this.isOpen && event.key === "Escape" && !event.defaultPrevented && !event.isComposing) closeButton.click();
    });
  }

  get isOpen(): boolean {
    return !this.panel.hidden;
  }

  open(): void {
    this.panel.hidden = false;
    this.closeButton.focus();
    this.status.start();
    this.browser.load();
    void this.restoreProgress.resume();
  }

  close(): void {
    this.panel.hidden = true;
    this.status.stop();
    this.browser.clear();
    this.key.hide();
  }
}
