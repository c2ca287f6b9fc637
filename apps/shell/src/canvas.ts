// The canvas: moved and zoomed by pointer, wheel, pinch and keys.
//
// Every gesture begins on the surface itself. What begins on an icon, a button or a panel is theirs.

export interface Box {
  width: number;
  height: number;
}

interface Point {
  x: number;
  y: number;
}

const LEAST = 0.3;
const MOST = 3;
const KEY_STEP = 64;
const MARGIN = 72;

export class Canvas {
  private at: Point = { x: 0, y: 0 };
  private zoom = 1;
  private readonly pointers = new Map<number, Point>();
  /** Whether the person has moved it; until then it follows the window. */
  private isTheirs = false;

  constructor(
    private readonly surface: HTMLElement,
    private readonly world: HTMLElement,
    private readonly size: () => Box,
    private readonly moved: (zoom: number) => void,
  ) {
    surface.addEventListener("pointerdown", (event) => this.down(event));
    surface.addEventListener("pointermove", (event) => this.move(event));
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"] as const) {
      surface.addEventListener(end, (event) => this.up(event));
    }
    surface.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    surface.addEventListener("keydown", (event) => this.key(event));
    addEventListener("resize", () => (this.isTheirs ? this.show() : this.fit()));
  }

  /** All of it in sight, at its own size where there is room. */
  fit(): void {
    const { width, height } = this.size();
    const { clientWidth, clientHeight } = this.surface;
    const room = Math.min((clientWidth - MARGIN) / width, (clientHeight - 2 * MARGIN) / height);
    this.zoom = Math.min(1, Math.max(LEAST, room));
    this.at = { x: (clientWidth - width * this.zoom) / 2, y: (clientHeight - height * this.zoom) / 2 };
    this.isTheirs = false;
    this.show();
  }

  /** Around the middle, by a button. */
  zoomBy(factor: number): void {
    this.zoomAround({ x: this.surface.clientWidth / 2, y: this.surface.clientHeight / 2 }, factor);
  }

  /** For a person who goes through the icons by keyboard. */
  reveal(icon: HTMLElement): void {
    const box = icon.getBoundingClientRect();
    const { clientWidth, clientHeight } = this.surface;
    const off = (from: number, to: number, room: number) =>
      from < MARGIN ? MARGIN - from : to > room - MARGIN ? room - MARGIN - to : 0;
    const by = { x: off(box.left, box.right, clientWidth), y: off(box.top, box.bottom, clientHeight) };
    if (by.x !== 0 || by.y !== 0) this.panBy(by);
  }

  get isUntouched(): boolean {
    return !this.isTheirs;
  }

  private panBy(by: Point): void {
    this.at = { x: this.at.x + by.x, y: this.at.y + by.y };
    this.isTheirs = true;
    this.show();
  }

  private zoomAround(point: Point, factor: number): void {
    const zoom = Math.min(MOST, Math.max(LEAST, this.zoom * factor));
    const by = zoom / this.zoom;
    this.at = { x: point.x - (point.x - this.at.x) * by, y: point.y - (point.y - this.at.y) * by };
    this.zoom = zoom;
    this.isTheirs = true;
    this.show();
  }

  private down(event: PointerEvent): void {
    const isMain = event.pointerType !== "mouse" || event.button === 0 || event.button === 1;
    if (event.target !== this.surface || !isMain || this.pointers.size === 2) return;
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    this.surface.setPointerCapture(event.pointerId);
    this.surface.dataset.moving = "";
  }

  private move(event: PointerEvent): void {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    const now = { x: event.clientX, y: event.clientY };
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    this.pointers.set(event.pointerId, now);
    if (!other) return this.panBy({ x: now.x - before.x, y: now.y - before.y });
    const [far, near] = [Math.hypot(now.x - other.x, now.y - other.y), Math.hypot(before.x - other.x, before.y - other.y)];
    if (near > 0) this.zoomAround({ x: (now.x + other.x) / 2, y: (now.y + other.y) / 2 }, far / near);
    // Two fingers also carry it, each by its half.
    this.panBy({ x: (now.x - before.x) / 2, y: (now.y - before.y) / 2 });
  }

  private up(event: PointerEvent): void {
    this.pointers.delete(event.pointerId);
    if (this.pointers.size === 0) delete this.surface.dataset.moving;
  }

  private wheel(event: WheelEvent): void {
    if (event.target !== this.surface) {
      // The page is never zoomed in the canvas' stead.
      if (event.ctrlKey) event.preventDefault();
      return;
    }
    event.preventDefault();
    const line = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
    const [x, y] = [event.deltaX * line, event.deltaY * line];
    // A pinch on a touchpad comes as a wheel with the control key.
    if (event.ctrlKey || event.metaKey) {
      this.zoomAround({ x: event.clientX, y: event.clientY }, Math.exp(-Math.max(-60, Math.min(60, y)) / 120));
    } else {
      this.panBy(event.shiftKey && x === 0 ? { x: -y, y: 0 } : { x: -x, y: -y });
    }
  }

  private key(event: KeyboardEvent): void {
    if (event.target !== this.surface || event.ctrlKey || event.metaKey || event.altKey) return;
    const pans: Record<string, Point> = {
      ArrowLeft: { x: KEY_STEP, y: 0 },
      ArrowRight: { x: -KEY_STEP, y: 0 },
      ArrowUp: { x: 0, y: KEY_STEP },
      ArrowDown: { x: 0, y: -KEY_STEP },
    };
    const pan = pans[event.key];
    if (pan) this.panBy(pan);
    else if (event.key === "+" || event.key === "=") this.zoomBy(1.25);
    else if (event.key === "-") this.zoomBy(0.8);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
  }

  private show(): void {
    const { x, y } = this.at;
    this.world.style.transform = `translate(${x}px, ${y}px) scale(${this.zoom})`;
    this.surface.style.setProperty("--x", `${x}px`);
    this.surface.style.setProperty("--y", `${y}px`);
    this.surface.style.setProperty("--zoom", String(this.zoom));
    this.moved(this.zoom);
  }
}
