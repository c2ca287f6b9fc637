// Paths of the owner's files, as the API shows them.

/** The user's home directory, which is the root of each snapshot. */
export const ROOT = "/home/svc";
/** The directory with the owner's own files. */
export const HOME = `${ROOT}/home`;
/** The directory with the machine's records and `config.json`, to which only the machine may write. */
const SYSTEM = `${HOME}/system`;

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

/** Returns the directories from the root down to a path, and the path itself. */
export function splitIntoCrumbs(path: string): Crumb[] {
  const crumbs = [{ name: ROOT, path: ROOT }];
  for (const name of path.slice(ROOT.length).split("/").filter(Boolean)) {
    crumbs.push({ name, path: joinPath(crumbs.at(-1)!.path, name) });
  }
  return crumbs;
}

/**
 * Whether earlier versions of a path can be restored only to another path, because it is the machine's `system`
 * directory, or is inside it, or contains it.
 */
export function needsAnotherPath(path: string): boolean {
  return `${path}/`.startsWith(`${SYSTEM}/`) || SYSTEM.startsWith(`${path}/`);
}
