// Reads the rows of a table, orders reads and writes, and retries failed ones with backoff.

import { addJitter, BridgeError, callBridge, type Change, type Row } from "./bridge";

const INITIAL_RETRY_DELAY_MS = 10_000;
const MAX_RETRY_DELAY_MS = 60_000;
/** The bridge's limit both for the ids in a filter and for the rows in a page. */
const MAX_IDS = 1000;

interface Page<T> {
  data: T[];
  nextCursor: string | null;
}

export interface TableQuery {
  table: string;
  /** The column to sort by; the newest rows are read first. */
  sortBy: "created_at" | "updated_at";
  pageSize: number;
  /** Reading stops after the page in which this number is reached. */
  maxRows: number;
}

export async function readRows<T extends Row>({ table, sortBy, pageSize, maxRows }: TableQuery): Promise<T[]> {
  const rows: T[] = [];
  let cursor: string | null = null;
  do {
    const page: Page<T> = await callBridge({
      action: "find",
      table,
      orderBy: [{ column: sortBy, direction: "desc" }],
      limit: pageSize,
      ...(cursor ? { after: cursor } : {}),
    });
    rows.push(...page.data);
    cursor = page.nextCursor;
  } while (cursor && rows.length < maxRows);
  return rows;
}

/** Returns the ids of the table's changed rows; `null` if the table must be reloaded (ids unknown or too many). */
export function collectChangedIds(table: string, changes: Change[]): string[] | null {
  const tableChanges = changes.filter((change) => change.table === table);
  if (tableChanges.some((change) => change.ids === null)) return null;
  const ids = [...new Set(tableChanges.flatMap((change) => change.ids ?? []))];
  return ids.length > MAX_IDS ? null : ids;
}

/** Reads the current versions of these rows, by id. Deleted rows are missing from the result. */
export async function readRowsById<T extends Row>(table: string, ids: string[]): Promise<Map<string, T>> {
  const filter = { id: { in: ids } };
  const rows = new Map<string, T>();
  let cursor: string | null = null;
  do {
    // A page of long rows ends before its limit.
    const page: Page<T> = await callBridge({
      action: "find",
      table,
      filter,
      limit: MAX_IDS,
      ...(cursor ? { after: cursor } : {}),
    });
    page.data.forEach((row) => rows.set(row.id, row));
    cursor = page.nextCursor;
  } while (cursor);
  return rows;
}

/**
 * Decides which results of reads are outdated: a read that overlapped a write or a later read must not replace what the
 * page has learned since that read began. Timestamps are not compared, because the machine's clock may be set back, and
 * deleted rows have no timestamp.
 */
export class ReadOrder {
  private latest = 0;
  /** The number of each row's last write, or of the read that was last accepted for it. */
  private readonly latestById = new Map<string, number>();

  /** Returns the number of a read that begins now. */
  beginRead(): number {
    this.latest += 1;
    return this.latest;
  }

  /** Records that this page has just written or deleted a row: reads that have already begun are outdated for it. */
  recordWrite(id: string): void {
    this.latest += 1;
    this.latestById.set(id, this.latest);
  }

  /** Whether the result of a read is current for a row. If it is, the results of earlier reads are outdated. */
  accept(id: string, read: number): boolean {
    if ((this.latestById.get(id) ?? 0) > read) return false;
    this.latestById.set(id, read);
    return true;
  }
}

/** Retries after retryable errors. The delay doubles with each failure, up to a minute, until `reset` is called. */
export class Backoff {
  private timer = 0;
  private delay = INITIAL_RETRY_DELAY_MS;

  constructor(private readonly retry: () => void) {}

  reset(): void {
    this.delay = INITIAL_RETRY_DELAY_MS;
  }

  /** Schedules a retry if the error is retryable. It replaces a retry that is already scheduled. */
  scheduleRetry(error: BridgeError): void {
    if (error.kind !== "retryable") return;
    clearTimeout(this.timer);
    this.timer = window.setTimeout(this.retry, addJitter(this.delay));
    this.delay = Math.min(MAX_RETRY_DELAY_MS, this.delay * 2);
  }
}

export function toBridgeError(error: unknown): BridgeError {
  return error instanceof BridgeError ? error : new BridgeError("rejected", String(error));
}
