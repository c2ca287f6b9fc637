// The canvas, which is panned and zoomed by pointer, wheel, pinch and keyboard.
//
// Every gesture starts on the surface itself. Events that start on an icon, a button or a panel are ignored.

export interface Size {
  width: number;
  height: number;
}

interface Point {
  x: number;
  y: number;
}

const MIN_ZOOM = 0.3;
const MAX_ZOOM = 3;
const KEY_PAN_STEP = 64;
const MARGIN = 72;
/** The height of a line, for wheel events that are measured in lines instead of pixels. */
const LINE_HEIGHT = 16;
/** Limits how far one wheel event zooms. */
const MAX_PINCH_DELTA = 60;

export class Canvas {
  private offset: Point = { x: 0, y: 0 };
  private zoom = 1;
  private readonly pointers = new Map<number, Point>();
  /** Whether everything is fitted to the window; false as soon as the user pans or zooms. */
  isFitted = true;

  constructor(
    private readonly surface: HTMLElement,
    private readonly world: HTMLElement,
    private readonly contentSize: () => Size,
    private readonly onZoomChange: (zoom: number) => void,
  ) {
    surface.addEventListener("pointerdown", (event) => this.onPointerDown(event));
    surface.addEventListener("pointermove", (event) => this.onPointerMove(event));
    for (const type of ["pointerup", "pointercancel", "lostpointercapture"] as const) {
      surface.addEventListener(type, (event) => this.onPointerEnd(event));
    }
    surface.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    surface.addEventListener("keydown", (event) => this.onKeyDown(event));
    addEventListener("resize", () => (this.isFitted ? this.fit() : this.applyTransform()));
  }

  /** Centers everything in the window, zoomed out if needed. */
  fit(): void {
    const { width, height } = this.contentSize();
    const { clientWidth, clientHeight } = this.surface;
    const fittingZoom = Math.min((clientWidth - MARGIN) / width, (clientHeight - 2 * MARGIN) / height);
    this.zoom = Math.min(1, Math.max(MIN_ZOOM, fittingZoom));
    this.offset = { x: (clientWidth - width * this.zoom) / 2, y: (clientHeight - height * this.zoom) / 2 };
    this.isFitted = true;
    this.applyTransform();
  }

  /** Zooms around the center of the window. */
  zoomBy(factor: number): void {
    this.zoomAround({ x: this.surface.clientWidth / 2, y: this.surface.clientHeight / 2 }, factor);
  }

  /** Pans until an icon is visible, for keyboard users who move the focus to it. */
  scrollIntoView(icon: HTMLElement): void {
    const rect = icon.getBoundingClientRect();
    const { clientWidth, clientHeight } = this.surface;
    const distanceToMargins = (start: number, end: number, length: number) =>
      start < MARGIN ? MARGIN - start : end > length - MARGIN ? length - MARGIN - end : 0;
    const delta = {
      x: distanceToMargins(rect.left, rect.right, clientWidth),
      y: distanceToMargins(rect.top, rect.bottom, clientHeight),
    };
    if (delta.x !== 0 || delta.y !== 0) this.panBy(delta);
  }

  private panBy(delta: Point): void {
    this.offset = { x: this.offset.x + delta.x, y: this.offset.y + delta.y };
    this.isFitted = false;
    this.applyTransform();
  }

  /** Zooms around `center`, which stays in place. */
  private zoomAround(center: Point, factor: number): void {
    const zoom = Math.min(MAX_ZOOM, Math.max(MIN_ZOOM, this.zoom * factor));
    const ratio = zoom / this.zoom;
    this.offset = {
      x: center.x - (center.x - this.offset.x) * ratio,
      y: center.y - (center.y - this.offset.y) * ratio,
    };
    this.zoom = zoom;
    this.isFitted = false;
    this.applyTransform();
  }

  private onPointerDown(event: PointerEvent): void {
    const canPan = event.pointerType !== "mouse" || event.button === 0 || event.button === 1;
    if (event.target !== this.surface || !canPan || this.pointers.size === 2) return;
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    this.surface.setPointerCapture(event.pointerId);
    this.surface.dataset.moving = "";
  }

  private onPointerMove(event: PointerEvent): void {
    const previous = this.pointers.get(event.pointerId);
    if (!previous) return;
    const current = { x: event.clientX, y: event.clientY };
    const other = [...this.pointers].find(([id]) => id !== event.pointerId)?.[1];
    this.pointers.set(event.pointerId, current);
    if (!other) return this.panBy({ x: current.x - previous.x, y: current.y - previous.y });
    const distance = Math.hypot(current.x - other.x, current.y - other.y);
    const previousDistance = Math.hypot(previous.x - other.x, previous.y - other.y);
    const center = { x: (current.x + other.x) / 2, y: (current.y + other.y) / 2 };
    if (previousDistance > 0) this.zoomAround(center, distance / previousDistance);
    // Two fingers also pan: the canvas follows their center. Each event reports one finger, so the center moves half as
    // far as that finger.
    this.panBy({ x: (current.x - previous.x) / 2, y: (current.y - previous.y) / 2 });
  }

  private onPointerEnd(event: PointerEvent): void {
    this.pointers.delete(event.pointerId);
    if (this.pointers.size === 0) delete this.surface.dataset.moving;
  }

  private onWheel(event: WheelEvent): void {
    if (event.target !== this.surface) {
      // Prevent the browser from zooming the whole page.
      if (event.ctrlKey) event.preventDefault();
      return;
    }
    event.preventDefault();
    const scale = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? LINE_HEIGHT : 1;
    const [x, y] = [event.deltaX * scale, event.deltaY * scale];
    // Browsers report a pinch on a touchpad as a wheel event with the control key.
    if (event.ctrlKey || event.metaKey) {
      const delta = Math.max(-MAX_PINCH_DELTA, Math.min(MAX_PINCH_DELTA, y));
      this.zoomAround({ x: event.clientX, y: event.clientY }, Math.exp(-delta / 120));
    } else {
      this.panBy(event.shiftKey && x === 0 ? { x: -y, y: 0 } : { x: -x, y: -y });
    }
  }

  private onKeyDown(event: KeyboardEvent): void {
    if (event.target !== this.surface || event.ctrlKey || event.metaKey || event.altKey) return;
    const panDeltas: Record<string, Point> = {
      ArrowLeft: { x: KEY_PAN_STEP, y: 0 },
      ArrowRight: { x: -KEY_PAN_STEP, y: 0 },
      ArrowUp: { x: 0, y: KEY_PAN_STEP },
      ArrowDown: { x: 0, y: -KEY_PAN_STEP },
    };
    const panDelta = panDeltas[event.key];
    if (panDelta) this.panBy(panDelta);
    else if (event.key === "+" || event.key === "=") this.zoomBy(1.25);
    else if (event.key === "-") this.zoomBy(0.8);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
  }

  private applyTransform(): void {
    const { x, y } = this.offset;
    this.world.style.transform = `translate(${x}px, ${y}px) scale(${this.zoom})`;
    // The background pattern moves with the canvas.
    this.surface.style.setProperty("--x", `${x}px`);
    this.surface.style.setProperty("--y", `${y}px`);
    this.surface.style.setProperty("--zoom", String(this.zoom));
    this.onZoomChange(this.zoom);
  }
}
