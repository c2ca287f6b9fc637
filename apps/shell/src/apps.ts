// Shows an icon for each app.
//
// An icon's image is requested only once. If the request fails, a tile with the first letter of the app's name is shown
// instead.

import { el } from "../../shared/ui";

export interface App {
  slug: string;
  name: string | null;
  url: string | null;
  status: "ready" | "waiting" | "error";
  error: string | null;
  /** The origins, other than its own, that the app may send data to. */
  connect?: string[];
  icon?: string;
}

const CELL = { width: 128, height: 136 };
const MAX_COLUMNS = 6;

export class AppIcons {
  private readonly items = new Map<string, HTMLLIElement>();
  private columns = 1;

  constructor(
    private readonly world: HTMLElement,
    private readonly onOpen: (app: App) => void,
  ) {}

  size(): { width: number; height: number } {
    const rows = Math.max(1, Math.ceil(this.items.size / this.columns));
    return { width: this.columns * CELL.width, height: rows * CELL.height };
  }

  /** Shows an icon for each app with a URL. Existing elements are reused, so their images are not requested again. */
  render(apps: App[]): void {
    const listedApps = apps.filter((app) => app.slug && app.url);
    const slugs = new Set(listedApps.map((app) => app.slug));
    for (const [slug, item] of this.items) {
      if (slugs.has(slug)) continue;
      item.remove();
      this.items.delete(slug);
    }
    this.columns = Math.max(1, Math.min(MAX_COLUMNS, Math.ceil(Math.sqrt(listedApps.length * 1.6))));
    listedApps.forEach((app, index) => {
      const item = this.items.get(app.slug) ?? this.createItem(app);
      this.updateItem(item, app);
      item.style.left = `${(index % this.columns) * CELL.width}px`;
      item.style.top = `${Math.floor(index / this.columns) * CELL.height}px`;
      if (this.world.children[index] !== item) this.world.insertBefore(item, this.world.children[index] ?? null);
    });
    const { width, height } = this.size();
    this.world.style.width = `${width}px`;
    this.world.style.height = `${height}px`;
  }

  /** Focuses an app's icon. Returns whether the app has one. */
  focus(slug: string): boolean {
    const link = this.items.get(slug)?.firstElementChild as HTMLElement | undefined;
    link?.focus();
    return link !== undefined;
  }

  private createItem(app: App): HTMLLIElement {
    const image = el("img", { alt: "", width: 72, height: 72, draggable: false, decoding: "async" });
    const tile = el("span", { className: "tile", hidden: true, "aria-hidden": "true" });
    image.onerror = () => {
      tile.textContent = (app.name ?? app.slug).trim().charAt(0).toLocaleUpperCase();
      tile.style.setProperty("--hue", String(hashToHue(app.slug)));
      tile.hidden = false;
      image.remove();
    };
    image.src = `/icons/${encodeURIComponent(app.slug)}`;
    const label = el("span", { className: "label" });
    const connections = el("span", { className: "connections" });
    const link = el("a", { href: app.url ?? "", draggable: false }, image, tile, label, connections);
    link.onclick = (event) => {
      // Let the browser open the link in a new tab or window.
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return;
      event.preventDefault();
      this.onOpen(app);
    };
    const item = el("li", {}, link);
    this.items.set(app.slug, item);
    return item;
  }

  private updateItem(item: HTMLLIElement, app: App): void {
    const link = item.firstElementChild as HTMLAnchorElement;
    const label = link.querySelector(".label") as HTMLElement;
    const name = app.name ?? app.slug;
    if (label.textContent !== name) label.textContent = name;
    link.dataset.status = app.status;
    const statusHint = {
      ready: "",
      waiting: "is being set up",
      error: `cannot be used: ${app.error ?? "unknown error"}`,
    }[app.status];
    const hosts = app.connect?.map((origin) => origin.replace("https://", "")).join(", ") ?? "";
    const connections = link.querySelector(".connections") as HTMLElement;
    connections.textContent = hosts && `connects to ${hosts}`;
    const hints = [statusHint, hosts && `may send data to ${hosts}`].filter(Boolean).join("; ");
    link.title = hints ? `${name} ${hints}` : name;
    if (hints) link.setAttribute("aria-description", hints);
    else link.removeAttribute("aria-description");
  }
}

/** Derives a hue from a string, so that an app always has the same color. */
function hashToHue(text: string): number {
  let hue = 0;
  for (const letter of text) hue = (hue * 31 + letter.codePointAt(0)!) % 360;
  return hue;
}
