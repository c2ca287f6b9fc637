// A note as this page knows it: what the bridge has, and what the person wrote since.

import type { Row } from "../../shared/bridge";

export interface NoteRow extends Row {
  title: string | null;
  body: string | null;
  pinned: boolean | null;
}

export interface Content {
  title: string;
  body: string;
  pinned: boolean;
}

export type Saving = "idle" | "waiting" | "running" | "failed";

export class Note {
  saving: Saving = "idle";
  timer = 0;

  private constructor(
    readonly id: string,
    /** `null`: the bridge does not have it yet. */
    public saved: Content | null,
    public content: Content,
    public updatedAt: string,
  ) {}

  static fresh(id: string): Note {
    return new Note(id, null, { title: "", body: "", pinned: false }, new Date().toISOString());
  }

  static of(row: NoteRow): Note {
    const content = contentOf(row);
    return new Note(row.id, content, { ...content }, row.updated_at);
  }

  get isDirty(): boolean {
    return this.saved === null ? !isEmpty(this.content) : !same(this.saved, this.content);
  }

  /** The bridge has this row now. What was written here since stays. */
  take(row: NoteRow): void {
    const dirty = this.isDirty;
    this.saved = contentOf(row);
    this.updatedAt = row.updated_at;
    if (!dirty) this.content = { ...this.saved };
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

  matches(words: string): boolean {
    const text = `${this.content.title}\n${this.content.body}`.toLocaleLowerCase();
    return words.toLocaleLowerCase().split(/\s+/).every((word) => text.includes(word));
  }
}

export function contentOf(row: NoteRow): Content {
  return { title: row.title ?? "", body: row.body ?? "", pinned: row.pinned ?? false };
}

export function same(one: Content, other: Content): boolean {
  return one.title === other.title && one.body === other.body && one.pinned === other.pinned;
}

export function isEmpty({ title, body, pinned }: Content): boolean {
  return title === "" && body === "" && !pinned;
}

/** Pinned ones first, then the latest. */
export function order(one: Note, other: Note): number {
  const pinned = Number(other.content.pinned) - Number(one.content.pinned);
  return pinned || other.updatedAt.localeCompare(one.updatedAt) || other.id.localeCompare(one.id);
}
