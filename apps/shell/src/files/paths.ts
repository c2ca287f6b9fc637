// Paths of the owner's files, as the API shows them.

/** Everything below it is backed up. */
export const ROOT = "/home/svc";
/** The directory with the owner's own files. */
export const HOME = `${ROOT}/home`;
/** The machine's records, which only the machine may write. */
const RECORDS = `${HOME}/system`;

export interface Crumb {
  name: string;
  path: string;
}

export function joinPath(directory: string, name: string): string {
  return `${directory}/${name}`;
}

export function parentPath(path: string): string {
  return path.slice(0, path.lastIndexOf("/"));
}

export function baseName(path: string): string {
  return path.slice(path.lastIndexOf("/") + 1);
}

/** Returns the directories on the way to a path, and the path itself. */
export function splitIntoCrumbs(path: string): Crumb[] {
  const crumbs = [{ name: ROOT, path: ROOT }];
  for (const name of path.slice(ROOT.length).split("/").filter(Boolean)) {
    crumbs.push({ name, path: joinPath(crumbs.at(-1)!.path, name) });
  }
  return crumbs;
}

/** Whether a path is, or contains, a directory that only the machine may write. */
export function isReserved(path: string): boolean {
  return `${path}/`.startsWith(`${RECORDS}/`) || RECORDS.startsWith(`${path}/`);
}
