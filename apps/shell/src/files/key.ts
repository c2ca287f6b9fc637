// The secret key of the backup, fetched only at the owner's request, and removed when it is hidden.

import { el } from "../../../shared/ui";
import { fetchKey, type RepositoryKey } from "./api";
import { button } from "./elements";
import { Loader } from "./loader";

const COMMANDS = ["restic snapshots", "restic ls latest", "restic restore latest --target ./mine"];

export class BackupKey {
  private readonly showButton = button("Show the key");
  private readonly hideButton = button("Hide the key");
  private readonly loader = new Loader();
  private readonly content = el("div");
  private readonly copyStatus = el("p", { role: "status" });
  readonly element = el("section", { className: "key", "aria-labelledby": "files-key-title" },
    el("h2", { id: "files-key-title" }, "Read the backup without this computer"),
    el("p", {},
      "With this key and credentials for the object store, the program ", el("code", {}, "restic"),
      " can read the backup. Anyone who has both can read all your files."),
    el("div", { className: "actions" }, this.showButton, this.hideButton),
    this.loader.element,
    this.content,
    this.copyStatus,
  );

  constructor() {
    this.hideButton.hidden = true;
    this.showButton.onclick = () => void this.loader.run(fetchKey, (key) => this.render(key));
    this.hideButton.onclick = () => {
      this.hide();
      this.showButton.focus();
    };
  }

  hide(): void {
    this.loader.cancel();
    this.content.replaceChildren();
    this.copyStatus.textContent = "";
    this.showButton.hidden = false;
    this.hideButton.hidden = true;
  }

  private render({ repository, password }: RepositoryKey): void {
    this.content.replaceChildren(
      el("dl", {}, ...this.createRow("Repository", repository), ...this.createRow("Password", password)),
      el("p", {},
        "Set them as ", el("code", {}, "RESTIC_REPOSITORY"), " and ", el("code", {}, "RESTIC_PASSWORD"),
        ", add the credentials for the store, and run:"),
      el("pre", {}, COMMANDS.join("\n")),
    );
    this.showButton.hidden = true;
    this.hideButton.hidden = false;
    this.hideButton.focus();
  }

  private createRow(name: string, text: string): HTMLElement[] {
    const value = el("code", {}, text);
    const copyButton = el("button", { type: "button", className: "link" }, "Copy");
    copyButton.setAttribute("aria-label", `Copy the ${name.toLowerCase()}`);
    copyButton.onclick = () => void this.copy(name, value);
    return [el("dt", {}, name), el("dd", {}, value, copyButton)];
  }

  private async copy(name: string, value: HTMLElement): Promise<void> {
    try {
      await navigator.clipboard.writeText(value.textContent ?? "");
      this.copyStatus.textContent = `${name} copied.`;
    } catch {
      // The browser denies access to the clipboard, for example without TLS.
      getSelection()?.selectAllChildren(value);
      this.copyStatus.textContent = `${name} selected: copy it with the keyboard.`;
    }
  }
}
