// Helpers for the shell's and the default apps' pages: elements, icons, and a toast.

type Child = Node | string;

/**
 * Creates an element. `role` and names with a hyphen, such as `aria-label`, are set as attributes, and all others as
 * properties. Values that are `undefined` are skipped.
 */
export function el<K extends keyof HTMLElementTagNameMap>(
  tagName: K,
  properties: Record<string, unknown> = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tagName);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined) continue;
    if (key.includes("-") || key === "role") element.setAttribute(key, String(value));
    else Object.assign(element, { [key]: value });
  }
  element.append(...children);
  return element;
}

const ICONS = {
  plus: "M12 5v14M5 12h14",
  trash: "M4 7h16M9 7V4.5h6V7M6.5 7l1 13h9l1-13M10 11v5.5M14 11v5.5",
  pin: "M9 3.5h6l-1 6 3.5 3.5h-11L10 9.5zM12 13v7.5",
  back: "M15 5l-7 7 7 7",
  search: "M10.5 17a6.5 6.5 0 1 1 0-13 6.5 6.5 0 0 1 0 13zM15.3 15.3L20 20",
  calendar: "M5 6h14v14H5zM5 10h14M9 3.5V7M15 3.5V7",
} as const;

/** Creates an icon. Screen readers ignore it, so the button around it needs a label. */
export function icon(name: keyof typeof ICONS): SVGSVGElement {
  const namespace = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(namespace, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(namespace, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export interface ToastAction {
  label: string;
  run: () => void;
}

/** One message at the bottom of the page, with at most one button. Screen readers announce it. */
export class Toast {
  private readonly container = el("div", { className: "toast", hidden: true });
  private readonly message = el("p", { role: "status" });
  private readonly actionSlot = el("span");
  private timer = 0;

  constructor(parent: HTMLElement) {
    this.container.append(this.message, this.actionSlot);
    parent.append(this.container);
  }

  /** Shows a message that disappears after a few seconds. */
  show(text: string, action?: ToastAction): void {
    this.render(text, "info", action);
    this.timer = window.setTimeout(() => this.dismiss(), action ? 10_000 : 4_000);
  }

  /** Shows a warning that stays until it is dismissed or replaced. */
  warn(text: string, action?: ToastAction): void {
    this.render(text, "warning", action);
  }

  /** Hides a warning; other messages disappear on their own. */
  dismissWarning(): void {
    if (this.container.dataset.kind === "warning") this.dismiss();
  }

  dismiss(): void {
    clearTimeout(this.timer);
    this.container.hidden = true;
    this.message.textContent = "";
    this.actionSlot.replaceChildren();
  }

  private render(text: string, kind: "info" | "warning", action?: ToastAction): void {
    clearTimeout(this.timer);
    this.container.dataset.kind = kind;
    this.message.textContent = text;
    this.actionSlot.replaceChildren();
    if (action) {
      const onclick = () => {
        this.dismiss();
        action.run();
      };
      this.actionSlot.append(el("button", { type: "button", className: "link", textContent: action.label, onclick }));
    }
    this.container.hidden = false;
  }
}

/** Whether the key event comes from an input or an editable element. */
export function isTyping(event: KeyboardEvent): boolean {
  const target = event.target as HTMLElement;
  return target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
}

export function pluralize(count: number, singular: string, plural = `${singular}s`): string {
  return `${count} ${count === 1 ? singular : plural}`;
}
