// The apps that the gateway knows, and an icon for each.
//
// An icon's image is asked for once. Where it does not come, a tile with the name's first letter stands in its place,
// and nothing is asked again.

import { el } from "../../shared/ui";

export interface App {
  slug: string;
  name: string | null;
  url: string | null;
  status: "ready" | "waiting" | "error";
  error: string | null;
  /** Sites beside its own that the app may send data to. */
  connect?: string[];
  icon?: string;
}

export class SignedOut extends Error {}

const DEADLINE_MS = 10_000;
const CELL = { width: 128, height: 136 };
const MOST_COLUMNS = 6;

export async function read<T>(path: string): Promise<T> {
  const answer = await fetch(path, {
    headers: { accept: "application/json" },
    signal: AbortSignal.timeout(DEADLINE_MS),
    redirect: "error",
  });
  if (answer.status === 401) throw new SignedOut();
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return (await answer.json()) as T;
}

export class Icons {
  private readonly items = new Map<string, HTMLLIElement>();
  private columns = 1;

  constructor(
    private readonly world: HTMLElement,
    private readonly open: (app: App) => void,
  ) {}

  size(): { width: number; height: number } {
    const rows = Math.max(1, Math.ceil(this.items.size / this.columns));
    return { width: this.columns * CELL.width, height: rows * CELL.height };
  }

  /** Elements that are there stay as they are: their images are not asked for again. */
  show(apps: App[]): void {
    const shown = apps.filter((app) => app.slug && app.url);
    const slugs = new Set(shown.map((app) => app.slug));
    for (const [slug, item] of this.items) {
      if (slugs.has(slug)) continue;
      item.remove();
      this.items.delete(slug);
    }
    this.columns = Math.max(1, Math.min(MOST_COLUMNS, Math.ceil(Math.sqrt(shown.length * 1.6))));
    shown.forEach((app, at) => {
      const item = this.items.get(app.slug) ?? this.made(app);
      this.paint(item, app);
      item.style.left = `${(at % this.columns) * CELL.width}px`;
      item.style.top = `${Math.floor(at / this.columns) * CELL.height}px`;
      if (this.world.children[at] !== item) this.world.insertBefore(item, this.world.children[at] ?? null);
    });
    const { width, height } = this.size();
    this.world.style.width = `${width}px`;
    this.world.style.height = `${height}px`;
  }

  private made(app: App): HTMLLIElement {
    const image = el("img", { alt: "", width: 72, height: 72, draggable: false, decoding: "async" });
    const tile = el("span", { className: "tile", hidden: true, "aria-hidden": "true" });
    image.onerror = () => {
      tile.textContent = (app.name ?? app.slug).trim().charAt(0).toLocaleUpperCase();
      tile.style.setProperty("--hue", String(hue(app.slug)));
      tile.hidden = false;
      image.remove();
    };
    image.src = `/icons/${encodeURIComponent(app.slug)}`;
    const link = el("a", { href: app.url ?? "", draggable: false }, image, tile, el("span", { className: "label" }), el("span", { className: "reach" }));
    link.onclick = (event) => {
      // A new tab or window is the browser's.
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
      event.preventDefault();
      this.open(app);
    };
    const item = el("li", {}, link);
    this.items.set(app.slug, item);
    return item;
  }

  private paint(item: HTMLLIElement, app: App): void {
    const link = item.firstElementChild as HTMLAnchorElement;
    const label = link.querySelector(".label") as HTMLElement;
    const name = app.name ?? app.slug;
    if (label.textContent !== name) label.textContent = name;
    link.dataset.status = app.status;
    const words = { ready: "", waiting: "is being set up", error: `cannot be used: ${app.error ?? "unknown"}` }[app.status];
    const sites = app.connect?.map((origin) => origin.replace("https://", "")).join(", ") ?? "";
    const reach = link.querySelector(".reach") as HTMLElement;
    reach.textContent = sites && `connects to ${sites}`;
    const hints = [words, sites && `may send data to ${sites}`].filter(Boolean).join("; ");
    link.title = hints ? `${name} ${hints}` : name;
    if (hints) link.setAttribute("aria-description", hints);
    else link.removeAttribute("aria-description");
  }

  focus(slug: string): boolean {
    const link = this.items.get(slug)?.firstElementChild as HTMLElement | undefined;
    link?.focus();
    return link !== undefined;
  }
}

function hue(text: string): number {
  let sum = 0;
  for (const letter of text) sum = (sum * 31 + letter.codePointAt(0)!) % 360;
  return sum;
}
