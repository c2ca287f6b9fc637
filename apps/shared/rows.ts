// One table's rows as a page keeps them: all of them at first, then those that changes name, and when to try again.

import { ask, BridgeError, type Change, type Row } from "./bridge";

const FIRST_PAUSE_MS = 5_000;
const LONGEST_PAUSE_MS = 60_000;
/** The most ids that one question may name. */
const MOST_IDS = 1000;

interface Page<T> {
  data: T[];
  nextCursor: string | null;
}

export interface Reading {
  table: string;
  newestBy: "created_at" | "updated_at";
  /** Rows asked for at once. */
  page: number;
  /** Where reading ends, the newest being read first. */
  most: number;
}

export async function allRows<T extends Row>({ table, newestBy, page, most }: Reading): Promise<T[]> {
  const rows: T[] = [];
  let cursor: string | null = null;
  do {
    const found: Page<T> = await ask({
      action: "find",
      table,
      orderBy: [{ column: newestBy, direction: "desc" }],
      limit: page,
      ...(cursor ? { after: cursor } : {}),
    });
    rows.push(...found.data);
    cursor = found.nextCursor;
  } while (cursor && rows.length < most);
  return rows;
}

/** Ids of the table's rows that the changes name; `null`: any row may be another now, or too many are. */
export function changedIds(table: string, changes: Change[]): string[] | null {
  const ours = changes.filter((change) => change.table === table);
  if (ours.some((change) => change.ids === null)) return null;
  const ids = [...new Set(ours.flatMap((change) => change.ids ?? []))];
  return ids.length > MOST_IDS ? null : ids;
}

/** The rows of these ids as they are now; one that is not there any more is in no entry. */
export async function rowsOf<T extends Row>(table: string, ids: string[]): Promise<Map<string, T>> {
  const filter = { id: { in: ids } };
  const found = await ask<Page<T>>({ action: "find", table, filter, limit: MOST_IDS });
  return new Map(found.data.map((row) => [row.id, row]));
}

/** What failed for a moment is tried again by itself, ever more seldom until something works. */
export class Patience {
  private timer = 0;
  private pause = FIRST_PAUSE_MS;

  constructor(private readonly retry: () => void) {}

  worked(): void {
    this.pause = FIRST_PAUSE_MS;
  }

  failed(error: BridgeError): void {
    if (error.why !== "later") return;
    clearTimeout(this.timer);
    this.pause = Math.min(LONGEST_PAUSE_MS, this.pause * 2);
    this.timer = window.setTimeout(this.retry, this.pause * (0.75 + Math.random() / 2));
  }
}

export function asBridgeError(error: unknown): BridgeError {
  return error instanceof BridgeError ? error : new BridgeError("refused", String(error));
}
