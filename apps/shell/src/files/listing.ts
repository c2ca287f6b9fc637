// A directory as it was saved: a table of its entries, page by page.

import { el } from "../../../shared/ui";
import { RequestError } from "../http";
import { type FileEntry, fetchListing, type Listing } from "./api";
import { button, hiddenText, verbatim } from "./elements";
import { formatBytes, formatCount, formatDateOrTime, formatTimestamp, KIND_LABELS } from "./format";
import { Loader } from "./loader";
import { HOME } from "./paths";

export class DirectoryListing {
  private readonly summary = el("p", { className: "summary", role: "status" });
  private readonly rows = el("tbody");
  private readonly table = el("table", { "aria-label": "Saved files", hidden: true },
    el("thead", {}, el("tr", {},
      ...["Name", "Size", "Changed"].map((title) => el("th", { scope: "col" }, title)))),
    this.rows,
  );
  private readonly moreButton = button("Show more");
  private readonly loader = new Loader();
  readonly element = el("div", { className: "listing" },
    this.summary, this.table, this.loader.element, this.moreButton);

  constructor(private readonly onOpen: (entry: FileEntry) => void) {
    this.moreButton.hidden = true;
  }

  /** Shows a directory in the last snapshot at or before `time`, or in the newest one if `time` is `null`. */
  async show(path: string, time: string | null): Promise<void> {
    this.clear();
    const load = async (signal: AbortSignal) => {
      try {
        return await fetchListing(path, time, 0, signal);
      } catch (error) {
        if (error instanceof RequestError && error.status === 404) return null;
        throw error;
      }
    };
    await this.loader.run(load, (listing) => {
      if (listing === null) this.summary.textContent = describeAbsence(path, time);
      else this.renderFirstPage(path, listing);
    });
  }

  clear(): void {
    this.loader.cancel();
    this.summary.textContent = "";
    this.rows.replaceChildren();
    this.table.hidden = true;
    this.moreButton.hidden = true;
  }

  private renderFirstPage(path: string, listing: Listing): void {
    const { entry, entries, savedAt } = listing;
    const content = entry.kind !== "directory" ? "This was not a directory" : entries.length === 0 ? "Empty" : "";
    const count = content || countEntries(listing);
    this.summary.textContent = `${count}, as saved at ${formatTimestamp(savedAt)}`;
    this.table.hidden = entries.length === 0;
    this.append(path, listing);
  }

  /** Adds a page, and returns the first new button. */
  private append(path: string, { entries, savedAt, nextCursor }: Listing): HTMLElement | undefined {
    const rows = entries.map((entry) => this.createRow(entry));
    this.rows.append(...rows);
    this.moreButton.hidden = nextCursor === null;
    this.moreButton.onclick = () => nextCursor !== null && void this.loadMore(path, savedAt, nextCursor);
    return rows[0]?.querySelector("button") ?? undefined;
  }

  /** Loads the next page of the same snapshot. */
  private async loadMore(path: string, savedAt: string, cursor: number): Promise<void> {
    this.moreButton.hidden = true;
    await this.loader.run(
      (signal) => fetchListing(path, savedAt, cursor, signal),
      (listing) => this.append(path, listing)?.focus(),
    );
  }

  private createRow(entry: FileEntry): HTMLTableRowElement {
    const { name, kind, sizeBytes, modifiedAt, target } = entry;
    const openButton = el("button", { type: "button", className: "entry", "data-kind": kind }, verbatim(name));
    if (kind !== "file") openButton.append(hiddenText(`, ${KIND_LABELS[kind]}`));
    if (target !== undefined) openButton.append(el("span", { className: "target" }, " → ", verbatim(target)));
    openButton.onclick = () => this.onOpen(entry);
    const title = formatTimestamp(modifiedAt);
    const changed = el("time", { dateTime: modifiedAt, title }, formatDateOrTime(modifiedAt));
    return el("tr", {},
      el("th", { scope: "row" }, openButton),
      el("td", {}, kind === "file" ? formatBytes(sizeBytes) : ""),
      el("td", {}, changed),
    );
  }
}

function countEntries({ entries, nextCursor }: Listing): string {
  if (nextCursor !== null) return `The first ${formatCount(entries.length, "entry", "entries")}`;
  return formatCount(entries.length, "entry", "entries");
}

function describeAbsence(path: string, time: string | null): string {
  if (time !== null) {
    return "There is no backup at or before this time, or the newest one does not contain this directory.";
  }
  return path === HOME ? "No files have been saved yet." : "This directory is not in the newest backup.";
}
