// The file history: a directory at a chosen time, or the versions of one file or directory.

import { el } from "../../../shared/ui";
import type { FileEntry } from "./api";
import { button, verbatim } from "./elements";
import { DirectoryListing } from "./listing";
import { HOME, joinPath, splitIntoCrumbs } from "./paths";
import { VersionList } from "./versions";

export class FileBrowser {
  private directory = HOME;
  /** The time as of which directories are shown; `null` for the newest backup. */
  private time: string | null = null;
  /** The path whose versions are shown instead of the directory. */
  private versionsPath: string | null = null;

  private readonly timeInput = el("input", { type: "datetime-local", id: "files-time", className: "field", step: "1" });
  private readonly newestButton = button("Newest");
  private readonly timeForm = el("form", { className: "time" },
    el("label", { htmlFor: "files-time" }, "As saved at or before"),
    this.timeInput,
    el("button", { className: "button quiet" }, "Show"),
    this.newestButton,
  );
  private readonly crumbs = el("ol");
  private readonly versionsButton = button();
  private readonly listing = new DirectoryListing((entry) => this.openEntry(entry));
  private readonly versions: VersionList;
  readonly element: HTMLElement;

  constructor(onRestore: () => void) {
    this.versions = new VersionList({
      onBrowse: (time) => this.versionsPath !== null && this.openDirectory(this.versionsPath, time),
      onRestore,
    });
    this.element = el("section", { className: "browser", "aria-labelledby": "files-browser-title" },
      el("h2", { id: "files-browser-title" }, "File history"),
      this.timeForm,
      el("nav", { className: "crumbs", "aria-label": "Directories" }, this.crumbs, this.versionsButton),
      this.listing.element,
      this.versions.element,
    );
    this.timeForm.onsubmit = (event) => {
      event.preventDefault();
      this.openDirectory(this.directory, parseLocalTime(this.timeInput.value));
    };
    this.newestButton.onclick = () => this.openDirectory(this.directory, null);
    this.versionsButton.onclick = () => {
      if (this.versionsPath === null) this.openVersions(this.directory);
      else this.openDirectory(this.directory, this.time);
    };
  }

  /** Loads the current directory, or the versions that are open. */
  load(): void {
    const { directory, time, versionsPath } = this;
    this.clear();
    this.timeInput.value = formatLocalTime(time === null ? new Date() : new Date(time));
    this.timeForm.hidden = versionsPath !== null;
    this.versionsButton.textContent = versionsPath === null ? "Versions of this directory" : "Back to the directory";
    this.renderCrumbs(versionsPath ?? directory);
    if (versionsPath === null) void this.listing.show(directory, time);
    else void this.versions.show(versionsPath);
  }

  /** Cancels requests, and clears their results. */
  clear(): void {
    this.listing.clear();
    this.versions.clear();
  }

  private openEntry({ name, kind }: FileEntry): void {
    const path = joinPath(this.directory, name);
    if (kind === "directory") this.openDirectory(path, this.time);
    else this.openVersions(path);
  }

  private openDirectory(directory: string, time: string | null): void {
    Object.assign(this, { directory, time, versionsPath: null });
    this.load();
    this.focusPath();
  }

  private openVersions(path: string): void {
    this.versionsPath = path;
    this.load();
    this.focusPath();
  }

  private renderCrumbs(path: string): void {
    const crumbs = splitIntoCrumbs(path).map((crumb) => {
      if (crumb.path === path) return el("strong", { tabIndex: -1, "aria-current": "location" }, verbatim(crumb.name));
      const onclick = () => this.openDirectory(crumb.path, this.time);
      return el("button", { type: "button", className: "link", onclick }, verbatim(crumb.name));
    });
    this.crumbs.replaceChildren(...crumbs.map((crumb) => el("li", {}, crumb)));
  }

  /** Focuses the current path: the element that had the focus may have been removed. */
  private focusPath(): void {
    this.crumbs.querySelector<HTMLElement>("[aria-current]")?.focus();
  }
}

/** Formats a time for an input of type `datetime-local`. */
function formatLocalTime(date: Date): string {
  const local = new Date(date.getTime() - date.getTimezoneOffset() * 60_000);
  return local.toISOString().slice(0, "2026-11-28T10:04:12".length);
}

/** Returns the end of the chosen second, or `null` if no time is chosen. */
function parseLocalTime(value: string): string | null {
  return value ? new Date(new Date(value).getTime() + 999).toISOString() : null;
}
