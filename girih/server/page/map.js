// The memory map: a canvas that shows what is in sight of a pool, and tells what somebody looks at.

import { palette } from "./colors.js";
import { count, plural, setText } from "./dom.js";
import { cellOf, hit, layOut, pageBox, pageGrid } from "./layout.js";
import { coloursOfCodes, paint } from "./paint.js";
import { codeOfRequest, NOBODY } from "./snapshot.js";

const MOST_ZOOM = 6;

export class MemoryMap {
  /**
   * @param frame the element that scrolls and has the keyboard; holds a canvas and a spacer.
   * @param scale says how many slabs a cell is.
   * @param onLook is told {slab, end, page, isHeld}, or null, whenever that or the snapshot has changed.
   */
  constructor(frame, scale, onLook) {
    this.frame = frame;
    this.canvas = frame.querySelector("canvas");
    this.spacer = frame.querySelector("div");
    this.scale = scale;
    this.onLook = onLook;
    this.mode = "group";
    this.poolIndex = 0;
    this.zoom = 0;
    this.lit = null; // the id of a request that is pointed out
    this.looked = null; // {slab, page}
    this.pointer = null; // where it is over the map, if it is there
    this.isHeld = false;
    this.snapshot = null;
    this.isWaiting = false;
    new ResizeObserver(() => this.draw()).observe(frame);
    frame.addEventListener("scroll", () => this.point(this.pointer));
    frame.addEventListener("pointermove", (event) => this.point(event));
    frame.addEventListener("pointerleave", () => this.point(null));
    frame.addEventListener("click", (event) => this.choose(this.at(event)));
    frame.addEventListener("keydown", (event) => this.onKey(event));
  }

  get pool() {
    return this.snapshot?.pools[this.poolIndex];
  }

  show(snapshot) {
    this.snapshot = snapshot;
    this.poolIndex = Math.min(this.poolIndex, Math.max(0, snapshot.pools.length - 1));
    if (this.pointer && !this.isHeld) this.looked = this.at(this.pointer); // what is there may have changed
    this.keepPlace();
    this.draw();
    this.tell();
  }

  /** Look at a place that there still is, when the pool or the zoom has changed. */
  keepPlace() {
    if (!this.looked || !this.layout) return;
    const { slab, page } = this.looked;
    const { slabsPerCell } = this.layout;
    if (!this.pool || slab >= this.pool.owners.length) this.looked = null;
    else if (slabsPerCell > 1) this.looked = { slab: slab - (slab % slabsPerCell), page: null };
    else if (page !== null) this.looked = { slab, page: Math.min(page, Math.max(0, this.pool.pages(slab).length - 1)) };
  }

  /** Change mode, poolIndex or lit. */
  set(changes) {
    if ("poolIndex" in changes) Object.assign(this, { looked: null, isHeld: false });
    Object.assign(this, changes);
    this.draw();
    this.tell();
  }

  zoomBy(steps) {
    if (!this.layout) return;
    const middle = this.looked?.slab ?? this.firstInSight();
    this.zoom = Math.min(MOST_ZOOM, Math.max(0, this.zoom + steps));
    this.paint();
    if (this.looked && this.layout.slabsPerCell === 1) this.looked.page ??= 0;
    this.keepPlace();
    this.bringIntoSight(middle);
    this.tell();
  }

  /** Look at what is under the pointer; null: it has gone. */
  point(pointer) {
    const isGone = pointer === null && this.pointer !== null;
    this.pointer = pointer;
    if (!this.isHeld && (pointer || isGone)) this.look(pointer && this.at(pointer));
    this.draw();
  }

  look(place) {
    if (place?.slab === this.looked?.slab && place?.page === this.looked?.page) return;
    this.looked = place;
    this.draw();
    this.tell();
  }

  /** Hold on to a place, let go of the one that is held, or zoom into a cell of several slabs. */
  choose(place) {
    if (place && this.layout.slabsPerCell > 1) {
      this.look(place);
      this.zoomBy(1);
      return;
    }
    if (place === null) this.pointer = null;
    const isSame = place?.slab === this.looked?.slab && place?.page === this.looked?.page;
    this.isHeld = place !== null && !(this.isHeld && isSame);
    this.looked = place;
    this.draw();
    this.tell();
  }

  tell() {
    const { looked, layout } = this;
    if (!looked || !layout) this.onLook(null);
    else this.onLook({ ...looked, end: Math.min(layout.numSlabs, looked.slab + layout.slabsPerCell), isHeld: this.isHeld });
  }

  at(event) {
    if (!this.layout || !this.pool) return null;
    const ratio = devicePixelRatio;
    const place = this.frame.getBoundingClientRect();
    const x = (event.clientX - place.left - this.frame.clientLeft) * ratio;
    const y = (event.clientY - place.top - this.frame.clientTop + this.frame.scrollTop) * ratio;
    return hit(this.layout, (slab) => this.pool.pages(slab).length, x, y);
  }

  onKey(event) {
    const keys = {
      ArrowRight: () => this.step(1, 0),
      ArrowLeft: () => this.step(-1, 0),
      ArrowDown: () => this.step(0, 1),
      ArrowUp: () => this.step(0, -1),
      Home: () => this.goTo(0),
      End: () => this.goTo(Infinity),
      Enter: () => this.looked && this.choose({ ...this.looked }),
      Escape: () => this.choose(null),
      "+": () => this.zoomBy(1),
      "-": () => this.zoomBy(-1),
    };
    const action = keys[event.key];
    if (!action || !this.layout || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  }

  /** Move by pages within slabs and beyond them, and by rows of cells. */
  step(right, down) {
    const { columns, slabsPerCell } = this.layout;
    if (!this.looked) {
      this.goTo(this.firstInSight());
      return;
    }
    const { slab, page } = this.looked;
    const next = page === null || down ? -1 : page + right;
    if (next >= 0 && next < this.pool.pages(slab).length) this.goTo(slab, next);
    else this.goTo(slab + (right + down * columns) * slabsPerCell, right < 0 ? Infinity : 0);
  }

  goTo(slab, page = 0) {
    const last = this.layout.numSlabs - 1;
    const at = Math.min(Math.max(0, slab), last);
    const perSlab = this.pool.pages(at).length;
    const isTold = perSlab > 0 && pageGrid(this.layout, perSlab) !== null;
    this.isHeld = false;
    this.pointer = null;
    this.look({ slab: at - (at % this.layout.slabsPerCell), page: isTold ? Math.min(page, perSlab - 1) : null });
    this.bringIntoSight(at);
  }

  firstInSight() {
    if (!this.layout) return 0;
    const row = Math.ceil((this.frame.scrollTop * devicePixelRatio) / this.layout.cell);
    return row * this.layout.columns * this.layout.slabsPerCell;
  }

  bringIntoSight(slab) {
    const { cell } = this.layout;
    const top = cellOf(this.layout, slab)[1] / devicePixelRatio;
    const { scrollTop, clientHeight } = this.frame;
    const side = cell / devicePixelRatio;
    if (top < scrollTop || top + side > scrollTop + clientHeight) this.frame.scrollTop = top - clientHeight / 2;
    this.draw();
  }

  /** Paint before the screen is next shown. */
  draw() {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => this.paint());
  }

  paint() {
    this.isWaiting = false;
    const { frame, canvas, pool } = this;
    const ratio = devicePixelRatio;
    const width = Math.floor(frame.clientWidth * ratio);
    const height = Math.floor(frame.clientHeight * ratio);
    if (!pool || !width || !height) return;
    this.layout = layOut(pool.owners.length, width, height, ratio, this.zoom);
    this.spacer.style.height = `${Math.max(0, this.layout.height / ratio - frame.clientHeight)}px`;
    if (this.image?.width !== width || this.image.height !== height) {
      Object.assign(canvas, { width, height });
      canvas.style.width = `${width / ratio}px`;
      canvas.style.height = `${height / ratio}px`;
      this.image = new ImageData(width, height);
    }
    const colours = palette();
    const { requests } = this.snapshot;
    const index = requests.findIndex(({ id }) => id === this.lit);
    const lit = index < 0 ? null : codeOfRequest(index);
    const lut = coloursOfCodes(colours, pool.groups.keys(), requests, this.mode, lit);
    const top = Math.round(frame.scrollTop * ratio);
    paint(new Int32Array(this.image.data.buffer), width, top, pool, this.layout, lut, colours.ground);
    const context = canvas.getContext("2d");
    context.putImageData(this.image, 0, 0);
    if (this.looked) this.outline(context, top, colours.line);
    const { slabsPerCell, numSlabs } = this.layout;
    const cells = slabsPerCell === 1 ? "one square each" : `${count(slabsPerCell)} in a square: zoom in to see pages`;
    setText(this.scale, `${plural(numSlabs, "slab")}, ${cells}`);
  }

  outline(context, top, colour) {
    const { layout, looked } = this;
    const [left, above] = cellOf(layout, looked.slab);
    const perSlab = this.pool.owners[looked.slab] === NOBODY ? 0 : this.pool.pages(looked.slab).length;
    const grid = perSlab && looked.page !== null ? pageGrid(layout, perSlab) : null;
    const side = layout.cell - layout.gap;
    const [x0, y0, x1, y1] = grid ? pageBox(layout, grid, looked.page) : [0, 0, side, side];
    context.strokeStyle = `rgb(${colour.join(" ")})`;
    context.lineWidth = 2;
    context.setLineDash(this.isHeld ? [] : [3, 2]);
    context.strokeRect(left + x0, above - top + y0, x1 - x0, y1 - y0);
  }
}
