// The routes below `/api/files`: the state of the backup, earlier versions of files, and restores.

import { fetchJson } from "../http";

/** Longer than the timeout of other requests, because the responding process first reads the backup's index. */
const HISTORY_TIMEOUT_MS = 60_000;
export const ENTRIES_PER_PAGE = 500;
export const VERSIONS_PER_PAGE = 50;

export interface BackupState {
  /** Everything that was written before this time is saved. */
  savedUntil: string | null;
  /** When the earliest change that is not saved yet was detected. */
  changedSince: string | null;
  /** An estimate of the bytes that are not saved yet; `null` if there are none, or if their number is unknown. */
  pendingBytes: number | null;
  /** Why the last save failed. */
  error: string | null;
  /** The number and the total size of the files when everything was last compared with the backup. */
  files: number;
  bytes: number;
  /** The number of entries that the last save could not read. */
  unreadable: number;
  firstUnreadable: string | null;
  /** The number of files that changed during each of the last save's attempts to read them. */
  unstable: number;
  invalidRules: string[];
  /** `null` until the excluded files have been measured. */
  excluded: Exclusions | null;
  /** When part of the backup was last verified. */
  verifiedAt: string | null;
  /** When a sample of the files was last restored and compared. */
  drilledAt: string | null;
  /** What the checks of the backup have found; `null` if everything is intact. */
  damage: string | null;
}

export interface Exclusions {
  measuredAt: string;
  entries: number;
  bytes: number;
  /** Whether everything was counted; otherwise, `entries` and `bytes` are lower bounds. */
  complete: boolean;
  largest: { path: string; entries: number; bytes: number }[];
}

export interface FileEntry {
  name: string;
  /** A machine that is updated while this page is open may send other kinds. */
  kind: "file" | "directory" | "link" | "special" | "unknown";
  sizeBytes: number;
  mode: string;
  modifiedAt: string;
  target?: string;
}

export interface Listing {
  savedAt: string;
  entry: FileEntry;
  entries: FileEntry[];
  nextCursor: number | null;
}

export interface Version {
  firstSavedAt: string;
  lastSavedAt: string;
  /** `null` if nothing existed at the path. */
  entry: FileEntry | null;
}

export interface VersionPage {
  versions: Version[];
  nextBefore: string | null;
  damagedSnapshots: number;
}

export interface RestoreRequest {
  path: string;
  time: string;
  into?: string;
  replace?: boolean;
}

export interface Restore {
  requestId: string;
  status: "pending" | "running" | "done" | "failed" | "unknown";
  path: string;
  savedAt: string | null;
  restoredTo: string | null;
  /** The path under which the replaced entry was kept. */
  keptAs: string | null;
  totalBytes: number;
  writtenBytes: number;
  /** Entries whose owner, mode, times or attributes could not be set. */
  incomplete: number;
  /** Why the restore failed or, if it is done, which damaged entries it left out. */
  error: string | null;
}

export interface RepositoryKey {
  repository: string;
  password: string;
}

function url(route: string, parameters: Record<string, string | number | null>): string {
  const presentParameters = Object.entries(parameters).filter(([, value]) => value !== null);
  return `/api/files/${route}?${new URLSearchParams(presentParameters.map(([name, value]) => [name, String(value)]))}`;
}

export function fetchBackupState(signal: AbortSignal): Promise<BackupState> {
  return fetchJson("/api/files/status", { signal });
}

export function fetchKey(signal: AbortSignal): Promise<RepositoryKey> {
  return fetchJson("/api/files/key", { signal });
}

/** Lists a directory in the last snapshot at or before `time`, or in the newest one if `time` is `null`. */
export function fetchListing(
  path: string,
  time: string | null,
  cursor: number,
  signal: AbortSignal,
): Promise<Listing> {
  const listingUrl = url("at", { path, time, cursor, limit: ENTRIES_PER_PAGE });
  return fetchJson(listingUrl, { signal, timeoutMs: HISTORY_TIMEOUT_MS });
}

export function fetchVersions(path: string, before: string | null, signal: AbortSignal): Promise<VersionPage> {
  const versionsUrl = url("versions", { path, before, limit: VERSIONS_PER_PAGE });
  return fetchJson(versionsUrl, { signal, timeoutMs: HISTORY_TIMEOUT_MS });
}

export function downloadUrl(path: string, time: string, format: "raw" | "zip"): string {
  return url("download", { path, time, format });
}

export function requestRestore(
  request: RestoreRequest,
  idempotencyKey: string,
  signal: AbortSignal,
): Promise<{ requestId: string }> {
  return fetchJson("/api/files/restore", { signal, body: request, idempotencyKey });
}

/** Returns the restore in progress or, if there is none, the last one; `null` if there has been none. */
export async function fetchRestore(): Promise<Restore | null> {
  return (await fetchJson<{ restore: Restore | null }>("/api/files/restore")).restore;
}
