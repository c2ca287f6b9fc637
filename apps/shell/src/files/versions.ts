// The saved versions of a file or directory, newest first. Each can be downloaded and restored.

import { el } from "../../../shared/ui";
import { downloadUrl, type FileEntry, fetchVersions, type Version, VERSIONS_PER_PAGE, type VersionPage } from "./api";
import { button, hiddenText, verbatim } from "./elements";
import { formatBytes, formatCount, formatTimestamp, KIND_LABELS } from "./format";
import { Loader } from "./loader";
import { RestoreForm } from "./restore-form";

export interface VersionListener {
  /** Called to show the directory as it was at this time. */
  onBrowse(time: string): void;
  /** Called when the machine has accepted a restore. */
  onRestore(): void;
}

export class VersionList {
  private readonly summary = el("p", { className: "summary", role: "status" });
  private readonly list = el("ol", { className: "versions", "aria-label": "Versions" });
  private readonly moreButton = button("Show more");
  private readonly loader = new Loader();
  readonly element = el("div", {}, this.summary, this.list, this.loader.element, this.moreButton);
  private versions: Version[] = [];
  /** Whether the last version may continue on the next page. */
  private mayContinue = false;
  private openForm: { form: RestoreForm; restoreButton: HTMLElement } | null = null;

  constructor(private readonly listener: VersionListener) {
    this.moreButton.hidden = true;
  }

  async show(path: string): Promise<void> {
    this.clear();
    await this.loader.run((signal) => fetchVersions(path, null, signal), (page) => this.append(path, page));
  }

  clear(): void {
    this.loader.cancel();
    this.closeForm();
    this.versions = [];
    this.mayContinue = false;
    this.summary.textContent = "";
    this.list.replaceChildren();
    this.moreButton.hidden = true;
  }

  /** Adds a page, and returns its first item. */
  private append(path: string, page: VersionPage): HTMLLIElement | undefined {
    const versions = [...page.versions];
    const [last, next] = [this.versions.at(-1), versions[0]];
    if (this.mayContinue && last && next && isSameVersion(last, next)) {
      last.firstSavedAt = next.firstSavedAt;
      this.closeForm();
      this.list.lastElementChild?.replaceWith(this.createItem(path, last));
      versions.shift();
    }
    // If there is another page although this one is not full, the search ended after its maximum number of snapshots,
    // perhaps between two snapshots of the same version.
    this.mayContinue = page.versions.length < VERSIONS_PER_PAGE;
    const items = versions.map((version) => this.createItem(path, version));
    this.versions.push(...versions);
    this.list.append(...items);
    this.summary.textContent = this.summarize(path, page);
    const { nextBefore } = page;
    this.moreButton.hidden = nextBefore === null;
    this.moreButton.onclick = () => nextBefore !== null && void this.loadMore(path, nextBefore);
    return items[0];
  }

  private async loadMore(path: string, before: string): Promise<void> {
    this.moreButton.hidden = true;
    await this.loader.run(
      (signal) => fetchVersions(path, before, signal),
      (page) => this.append(path, page)?.querySelector<HTMLElement>("a, button")?.focus(),
    );
  }

  private summarize(path: string, { nextBefore, damagedSnapshots }: VersionPage): string {
    const hasMore = nextBefore !== null;
    const count = formatCount(this.versions.length, "version");
    const damage = damagedSnapshots > 0 ? ` ${formatCount(damagedSnapshots, "backup")} could not be searched.` : "";
    if (this.versions.length > 0) return `${hasMore ? `The newest ${count}` : count}.${damage}`;
    if (hasMore) return `No version has been found yet.${damage}`;
    // The API replaces bytes that are not UTF-8, so this path does not name the file.
    const hint = path.includes("\ufffd") ? " Its name is not valid UTF-8: restore the directory that contains it." : "";
    return `No version has been saved.${hint}${damage}`;
  }

  private createItem(path: string, version: Version): HTMLLIElement {
    const { entry } = version;
    const item = el("li", {},
      el("p", {}, ...(entry ? describeEntry(entry) : [el("strong", {}, "Did not exist")])),
      el("p", { className: "period" }, describePeriod(version)),
    );
    if (entry) item.append(this.createActions(path, version.lastSavedAt, entry.kind, item));
    return item;
  }

  private createActions(path: string, time: string, kind: FileEntry["kind"], item: HTMLElement): HTMLElement {
    const actions = el("div", { className: "actions" });
    const version = () => hiddenText(` the version of ${formatTimestamp(time)}`);
    if (kind === "directory") {
      const browseButton = button("Browse", version());
      browseButton.onclick = () => this.listener.onBrowse(time);
      actions.append(browseButton);
    }
    if (kind === "file" || kind === "directory") {
      const href = downloadUrl(path, time, kind === "file" ? "raw" : "zip");
      actions.append(el("a", { className: "button quiet", href, download: "" }, "Download", version()));
    }
    if (kind !== "special") {
      const restoreButton = button("Restore", version());
      restoreButton.setAttribute("aria-expanded", "false");
      restoreButton.onclick = () => this.toggleForm(path, time, item, restoreButton);
      actions.append(restoreButton);
    }
    return actions;
  }

  /** Opens the restore form below a version, or closes it. At most one form is open. */
  private toggleForm(path: string, time: string, item: HTMLElement, restoreButton: HTMLElement): void {
    const wasOpen = this.openForm?.restoreButton === restoreButton;
    this.closeForm();
    if (wasOpen) return;
    const close = () => {
      this.closeForm();
      restoreButton.focus();
    };
    const form = new RestoreForm(path, time, {
      onAccept: () => {
        close();
        this.listener.onRestore();
      },
      onCancel: close,
    });
    this.openForm = { form, restoreButton };
    restoreButton.setAttribute("aria-expanded", "true");
    item.append(form.element);
    form.focus();
  }

  private closeForm(): void {
    this.openForm?.form.remove();
    this.openForm?.restoreButton.setAttribute("aria-expanded", "false");
    this.openForm = null;
  }
}

/** Whether two versions are the same. Directories never count as the same, because their contents could differ. */
function isSameVersion(a: Version, b: Version): boolean {
  return a.entry?.kind !== "directory" && JSON.stringify(a.entry) === JSON.stringify(b.entry);
}

function describeEntry({ kind, sizeBytes, mode, modifiedAt, target }: FileEntry): (Node | string)[] {
  const facts = [kind === "file" ? formatBytes(sizeBytes) : KIND_LABELS[kind], `mode ${mode}`];
  const changed = el("time", { dateTime: modifiedAt }, `Changed ${formatTimestamp(modifiedAt)}`);
  const link = target === undefined ? [] : [" → ", verbatim(target)];
  return [el("strong", {}, changed), el("span", {}, ` ${facts.join(", ")}`, ...link)];
}

function describePeriod({ firstSavedAt, lastSavedAt, entry }: Version): string {
  const [first, last] = [formatTimestamp(firstSavedAt), formatTimestamp(lastSavedAt)];
  const backups = first === last ? `the backup of ${first}` : `the backups from ${first} to ${last}`;
  return entry ? `In ${backups}` : `Missing from ${backups}`;
}
