// The form for restoring a version: next to the current one, in its place, or at another path.

import { el } from "../../../shared/ui";
import { RequestError } from "../http";
import { requestRestore } from "./api";
import { button } from "./elements";
import { Loader } from "./loader";
import { HOME, needsAnotherPath } from "./paths";

type Placement = "beside" | "replace" | "into";

interface Choice {
  value: Placement;
  label: string;
  hint: string;
}

const CHOICES: Choice[] = [
  {
    value: "beside",
    label: "Next to the current one",
    hint: "The time of the backup is added to its name. If nothing exists at the original path, it is restored there.",
  },
  {
    value: "replace",
    label: "Replace the current one",
    hint:
      "The current one is saved first, and kept in its directory under another name. Stop programs that write to it.",
  },
  { value: "into", label: "To another path", hint: `Relative paths start at ${HOME}.` },
];
const RESERVED_HINT =
  "Your computer manages this path, or a directory in it, so its versions can be restored only to another path.";

export interface RestoreFormListener {
  /** Called when the machine has accepted the restore. */
  onAccept(): void;
  onCancel(): void;
}

export class RestoreForm {
  private readonly radios: HTMLInputElement[] = [];
  private readonly pathInput = el("input", { className: "field", "aria-label": "Path", required: true });
  private readonly submitButton = el("button", { className: "button primary" }, "Restore");
  private readonly loader = new Loader();
  /** The last request, as JSON, and its idempotency key. */
  private attempt: { request: string; key: string } | null = null;
  readonly element: HTMLFormElement;

  constructor(
    private readonly path: string,
    private readonly time: string,
    private readonly listener: RestoreFormListener,
  ) {
    const isAnotherPathNeeded = needsAnotherPath(path);
    const choices = isAnotherPathNeeded ? CHOICES.filter(({ value }) => value === "into") : CHOICES;
    const cancelButton = button("Cancel");
    cancelButton.onclick = () => listener.onCancel();
    this.element = el("form", { className: "restore" },
      el("fieldset", {},
        el("legend", {}, "Where to restore it"),
        ...(isAnotherPathNeeded ? [el("p", {}, RESERVED_HINT)] : []),
        ...choices.map((choice) => this.createChoice(choice)),
        this.pathInput,
      ),
      this.loader.element,
      el("div", { className: "actions" }, this.submitButton, cancelButton),
    );
    this.element.onchange = () => this.updatePathInput();
    this.element.onsubmit = (event) => {
      event.preventDefault();
      void this.submit();
    };
    this.pathInput.spellcheck = false;
    this.radios[0]!.checked = true;
    this.updatePathInput();
  }

  focus(): void {
    this.radios[0]!.focus();
  }

  /** Removes the form. A restore that is already requested continues. */
  remove(): void {
    this.loader.cancel();
    this.element.remove();
  }

  private createChoice({ value, label, hint }: Choice): HTMLElement {
    const [id, hintId] = [`restore-${value}`, `restore-${value}-hint`];
    const radio = el("input", { type: "radio", name: "placement", value, id, "aria-describedby": hintId });
    this.radios.push(radio);
    const text = el("div", {}, el("label", { htmlFor: id }, label), el("small", { id: hintId }, hint));
    return el("div", { className: "choice" }, radio, text);
  }

  private get placement(): Placement {
    return this.radios.find((radio) => radio.checked)!.value as Placement;
  }

  private updatePathInput(): void {
    const isNeeded = this.placement === "into";
    this.pathInput.hidden = !isNeeded;
    this.pathInput.disabled = !isNeeded;
  }

  /** Returns the same key when a request is repeated, because the response to the first attempt may have been lost. */
  private idempotencyKeyFor(request: string): string {
    if (this.attempt?.request !== request) {
      this.attempt = { request, key: crypto.getRandomValues(new Uint32Array(4)).join("-") };
    }
    return this.attempt.key;
  }

  private async submit(): Promise<void> {
    const { path, time, placement } = this;
    const request = {
      path,
      time,
      ...(placement === "into" ? { into: this.pathInput.value } : {}),
      ...(placement === "replace" ? { replace: true } : {}),
    };
    const idempotencyKey = this.idempotencyKeyFor(JSON.stringify(request));
    this.submitButton.disabled = true;
    const load = async (signal: AbortSignal) => {
      try {
        return await requestRestore(request, idempotencyKey, signal);
      } catch (error) {
        throw explainInvalidPath(error);
      }
    };
    await this.loader.run(load, () => this.listener.onAccept(), { progressText: "Requesting the restore…" });
    this.submitButton.disabled = false;
  }
}

/**
 * Turns the detail of an invalid field, such as "must not be empty", into a sentence about the path, which is the only
 * field that the owner enters.
 */
function explainInvalidPath(error: unknown): unknown {
  const [fieldError] = error instanceof RequestError ? error.fieldErrors : [];
  if (!fieldError) return error;
  return new RequestError(`Invalid path: it ${fieldError.detail}.`, (error as RequestError).status);
}
