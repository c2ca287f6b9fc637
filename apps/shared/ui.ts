// The little that both apps need of a page: elements, one line of news, and whether changes are live.

type Child = Node | string;

/** An element with properties and children; `aria-…` and `data-…` become attributes. */
export function el<K extends keyof HTMLElementTagNameMap>(
  name: K,
  properties: Record<string, unknown> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined) continue;
    if (key.includes("-") || key === "role") made.setAttribute(key, String(value));
    else Object.assign(made, { [key]: value });
  }
  made.append(...children);
  return made;
}

const ICONS = {
  plus: "M12 5v14M5 12h14",
  trash: "M4 7h16M9 7V4.5h6V7M6.5 7l1 13h9l1-13M10 11v5.5M14 11v5.5",
  pin: "M9 3.5h6l-1 6 3.5 3.5h-11L10 9.5zM12 13v7.5",
  back: "M15 5l-7 7 7 7",
  search: "M10.5 17a6.5 6.5 0 1 1 0-13 6.5 6.5 0 0 1 0 13zM15.3 15.3L20 20",
  calendar: "M5 6h14v14H5zM5 10h14M9 3.5V7M15 3.5V7",
} as const;

/** A line drawing that reads as nothing; the button around it has the words. */
export function icon(name: keyof typeof ICONS): SVGSVGElement {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export interface Offer {
  label: string;
  act: () => void;
}

/** One line of news at the bottom, read out by screen readers, with at most one thing to do about it. */
export class News {
  private readonly line = el("div", { className: "news", hidden: true });
  private readonly words = el("p", { role: "status" });
  private readonly slot = el("span");
  private timer = 0;

  constructor(parent: HTMLElement) {
    this.line.append(this.words, this.slot);
    parent.append(this.line);
  }

  /** Goes away by itself. */
  tell(text: string, offer?: Offer): void {
    this.show(text, "calm", offer);
    this.timer = window.setTimeout(() => this.clear(), offer ? 10_000 : 4_000);
  }

  /** Stays until it is taken back: something is not as the person thinks it is. */
  warn(text: string, offer?: Offer): void {
    this.show(text, "warning", offer);
  }

  /** Takes a warning back; other news goes by itself. */
  settle(): void {
    if (this.line.dataset.kind === "warning") this.clear();
  }

  clear(): void {
    clearTimeout(this.timer);
    this.line.hidden = true;
    this.words.textContent = "";
    this.slot.replaceChildren();
  }

  private show(text: string, kind: string, offer?: Offer): void {
    clearTimeout(this.timer);
    this.line.dataset.kind = kind;
    this.words.textContent = text;
    this.slot.replaceChildren();
    if (offer) {
      const act = () => {
        this.clear();
        offer.act();
      };
      this.slot.append(el("button", { type: "button", className: "link", textContent: offer.label, onclick: act }));
    }
    this.line.hidden = false;
  }
}

/** Whether the event's key belongs to a field that the person types into. */
export function isTyping(event: KeyboardEvent): boolean {
  const target = event.target as HTMLElement;
  return target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
}

export function plural(count: number, one: string, many = `${one}s`): string {
  return `${count} ${count === 1 ? one : many}`;
}
