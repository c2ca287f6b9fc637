// Small elements that the parts of the Files view share.

import { el } from "../../../shared/ui";
import { toVisibleText } from "./format";

/** Creates an element for a name or other text from the machine, which may be long and contain any characters. */
export function verbatim(text: string): HTMLElement {
  return el("bdi", { className: "verbatim" }, toVisibleText(text));
}

/** Creates an element with text for screen readers only. */
export function hiddenText(text: string): HTMLElement {
  return el("span", { className: "sr-only" }, text);
}

export function button(...label: (Node | string)[]): HTMLButtonElement {
  return el("button", { type: "button", className: "button quiet" }, ...label);
}
