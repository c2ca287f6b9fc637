// A note on this page: the content that was last saved, and the content that the user is editing.

import type { Row } from "../../shared/bridge";

export interface NoteRow extends Row {
  title: string | null;
  body: string | null;
  pinned: boolean | null;
}

export interface NoteContent {
  title: string;
  body: string;
  pinned: boolean;
}

export type SaveState = "idle" | "scheduled" | "saving" | "failed";

export class Note {
  saveState: SaveState = "idle";
  saveTimer = 0;

  private constructor(
    readonly id: string,
    /** `null` if the note has no row, because it is new or its row was deleted elsewhere. */
    public savedContent: NoteContent | null,
    public content: NoteContent,
    /** The row's `updated_at`, by which a save detects that the note was changed elsewhere. */
    public updatedAt: string,
  ) {}

  static createEmpty(id: string): Note {
    return new Note(id, null, { title: "", body: "", pinned: false }, new Date().toISOString());
  }

  static fromRow(row: NoteRow): Note {
    const content = toContent(row);
    return new Note(row.id, content, { ...content }, row.updated_at);
  }

  get isDirty(): boolean {
    return this.savedContent === null ? !isEmpty(this.content) : !isSameContent(this.savedContent, this.content);
  }

  /** Updates the saved content from a row; unsaved edits are kept. */
  applyRow(row: NoteRow): void {
    const wasDirty = this.isDirty;
    this.savedContent = toContent(row);
    this.updatedAt = row.updated_at;
    if (!wasDirty) this.content = { ...this.savedContent };
  }

  get heading(): string {
    return this.content.title.trim() || this.firstLine || "Untitled";
  }

  get preview(): string {
    const text = this.content.body.replace(/\s+/g, " ").trim();
    return this.content.title.trim() ? text : text.slice(this.firstLine.length).trim();
  }

  private get firstLine(): string {
    return this.content.body.trim().split("\n")[0]?.slice(0, 80) ?? "";
  }

  /** Whether the note contains every word of the search text. */
  matches(searchText: string): boolean {
    const text = `${this.content.title}\n${this.content.body}`.toLocaleLowerCase();
    return searchText.toLocaleLowerCase().split(/\s+/).every((word) => text.includes(word));
  }
}

export function toContent(row: NoteRow): NoteContent {
  return { title: row.title ?? "", body: row.body ?? "", pinned: row.pinned ?? false };
}

export function isSameContent(a: NoteContent, b: NoteContent): boolean {
  return a.title === b.title && a.body === b.body && a.pinned === b.pinned;
}

export function isEmpty({ title, body, pinned }: NoteContent): boolean {
  return title === "" && body === "" && !pinned;
}

/** Sorts pinned notes first, then the most recently updated. */
export function compareNotes(a: Note, b: Note): number {
  const byPinned = Number(b.content.pinned) - Number(a.content.pinned);
  return byPinned || b.updatedAt.localeCompare(a.updatedAt) || b.id.localeCompare(a.id);
}
