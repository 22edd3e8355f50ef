// One program as nested levels: boxes that open in place, edges as thick as the bytes that they carry.

import { Item, Program, sourceBytes, sourceName } from "./model";
import { curve, layOut, Laid } from "./layout";
import { bytes, clear, count, fitted, h, plural, s, textWidth } from "./dom";

const TITLE = "600 12.5px system-ui, sans-serif";
const SMALL = "11px system-ui, sans-serif";
const HEADER = 28;
const PAD = 14;
const LEAST_WIDTH = 64;
const MOST_TEXT = 210;
const MOST_FOLLOWED = 40;

interface View { item: Item; laid: Laid | null; children: View[]; width: number; height: number; x: number; y: number }

export interface PaneHost {
  color(item: Item): number | null;
  select(pane: Pane, item: Item | null): void;
  toggled?(pane: Pane, item: Item): void;
  panned?(pane: Pane, dx: number, dy: number): void;
  zoomed?(pane: Pane, factor: number, x: number, y: number): void;
  marked?(item: Item): string | null;
}

export class Pane {
  readonly element: HTMLElement;
  private svg: SVGElement;
  private stage: SVGElement;
  private open = new Set<string>();
  private all = new Set<string>();
  private units = new Map<string, number>();
  private view!: View;
  private nodes = new Map<string, SVGElement>();
  private places = new Map<string, { x: number; y: number; width: number; height: number }>();
  selected: Item | null = null;
  scale = 1;
  x = 0;
  y = 0;

  constructor(readonly program: Program, private host: PaneHost, label: string) {
    this.stage = s("g", { class: "stage" });
    this.svg = s("svg", { class: "drawing", role: "tree", tabindex: 0, "aria-label": label,
      "onkeydown": (event: KeyboardEvent) => this.key(event) }, this.stage);
    this.element = h("div", { class: "pane" }, this.svg, this.buttons());
    this.svg.addEventListener("wheel", (event) => this.wheel(event as WheelEvent), { passive: false });
    this.drag();
    this.open.add(program.root.key);
    this.openSome();
  }

  private buttons(): HTMLElement {
    const button = (text: string, label: string, action: () => void) =>
      h("button", { type: "button", title: label, "aria-label": label, onclick: action }, text);
    return h("div", { class: "zoom", role: "group", "aria-label": "zoom" },
      button("+", "zoom in (+)", () => this.zoom(1.25)),
      button("−", "zoom out (−)", () => this.zoom(0.8)),
      button("Fit", "show all (0)", () => this.fit(true)));
  }

  /** Opens levels from the outside in, as long as what is shown stays easy to take in. */
  private openSome(): void {
    let shown = this.program.root.children().length;
    const queue = [...this.program.root.children()];
    while (queue.length) {
      const item = queue.shift()!;
      if (item.leaf || item.template.t === "region") continue;
      const inner = this.shown(item);
      // A program of one large part would else be a few boxes in an empty window.
      if (shown + inner.length > (shown < 12 ? 72 : 34)) continue;
      this.open.add(item.key);
      shown += inner.length;
      queue.push(...inner);
    }
  }

  /** Opens what corresponds to the levels that another pane has open, unless it is much more to take in. */
  openLike(other: Pane): void {
    const stack = [other.program.root];
    while (stack.length) {
      const item = stack.pop()!;
      if (item.leaf || !other.isOpen(item)) continue;
      stack.push(...other.shown(item));
      const same = item.template.t === "region" || item.template.t === "fold" ? null : this.program.counterpart(item);
      if (!same || same.leaf || same.template.t === "region" || same.children().length > MOST_FOLLOWED) continue;
      this.openAround(same);
      this.open.add(same.key);
    }
  }

  isOpen(item: Item): boolean {
    return this.open.has(item.key);
  }

  unitOf(fold: Item): number {
    return Math.min(this.units.get(fold.key) ?? 0, fold.template.n! - 1);
  }

  showsAll(fold: Item): boolean {
    return this.all.has(fold.key);
  }

  /** The boxes inside an open one. Of a fold it is what one unit has, unless all units are shown. */
  private shown(item: Item): Item[] {
    if (item.template.t !== "fold" || this.showsAll(item)) return item.children();
    const unit = item.unit(this.unitOf(item));
    return unit.leaf || unit.template.t === "region" ? [unit] : unit.children();
  }

  private level(item: Item): Item {
    if (item.template.t !== "fold" || this.showsAll(item)) return item;
    const unit = item.unit(this.unitOf(item));
    return unit.leaf || unit.template.t === "region" ? item : unit;
  }

  toggle(item: Item, open = !this.isOpen(item)): void {
    if (item.leaf || open === this.isOpen(item)) return;
    const before = this.places.get(item.id);
    if (open) this.open.add(item.key);
    else this.open.delete(item.key);
    this.draw();
    const after = this.places.get(item.id);
    // What was clicked stays where it is.
    if (before && after) this.pan((before.x + before.width / 2 - after.x - after.width / 2) * this.scale, (before.y - after.y) * this.scale);
    this.host.toggled?.(this, item);
  }

  showAll(fold: Item, all: boolean): void {
    if (all) this.all.add(fold.key);
    else this.all.delete(fold.key);
    this.open.add(fold.key);
    this.draw();
    this.host.toggled?.(this, fold);
  }

  showUnit(fold: Item, unit: number): void {
    this.units.set(fold.key, Math.max(0, Math.min(fold.template.n! - 1, unit)));
    this.draw();
    this.host.toggled?.(this, fold);
  }

  /** Shows an item at a height on the screen, opened as its counterpart in the other pane is. */
  align(item: Item, top: number, open: boolean | null): void {
    this.openAround(item);
    if (open !== null && !item.leaf) {
      if (open) this.open.add(item.key);
      else this.open.delete(item.key);
    }
    this.draw();
    const place = this.places.get(item.id);
    if (!place) return;
    this.y = top - place.y * this.scale;
    const middle = (place.x + place.width / 2) * this.scale + this.x;
    if (middle < 40 || middle > this.svg.clientWidth - 40) this.x += this.svg.clientWidth / 2 - middle;
    this.selected = item;
    this.mark();
    this.place(this.x, this.y, this.scale);
  }

  /** How far down on the screen an item is drawn. */
  top(item: Item): number {
    return (this.places.get(item.id)?.y ?? 0) * this.scale + this.y;
  }

  private openAround(item: Item): void {
    for (const around of item.ancestors().reverse()) {
      if (around.template.t === "fold" && around.parent?.template.t !== "fold") this.units.set(around.key, unitIndex(around, item));
      this.open.add(around.key);
    }
  }

  /** Opens everything around an item and brings it into view. */
  reveal(item: Item, select = true): void {
    this.openAround(item);
    this.draw();
    const target = this.places.has(item.id) ? item : item.ancestors().find((a) => this.places.has(a.id));
    if (target) this.center(target);
    if (select) this.choose(item);
  }

  choose(item: Item | null): void {
    this.selected = item;
    this.mark();
    this.host.select(this, item);
  }

  mark(): void {
    for (const [id, node] of this.nodes) {
      const on = id === this.selected?.id;
      node.classList.toggle("selected", on);
      node.setAttribute("aria-selected", String(on));
    }
    const id = this.selected?.id;
    for (const edge of this.stage.querySelectorAll(".edge"))
      edge.classList.toggle("near", id !== undefined && (edge.getAttribute("data-from") === id || edge.getAttribute("data-to") === id));
  }

  draw(): void {
    this.view = this.measure(this.program.root);
    clear(this.stage);
    this.nodes.clear();
    this.places.clear();
    this.paint(this.view, 0, 0, this.stage, true);
    this.mark();
    this.transform();
  }

  private measure(item: Item): View {
    if (!this.isOpen(item) || item.leaf) {
      const [title, small] = this.texts(item);
      const extra = item.leaf ? 28 : 48;
      const width = Math.max(LEAST_WIDTH, Math.min(MOST_TEXT, Math.max(textWidth(title, TITLE), textWidth(small, SMALL))) + extra);
      return { item, laid: null, children: [], width: Math.ceil(width), height: small ? 38 : 26, x: 0, y: 0 };
    }
    const level = this.level(item);
    const children = this.shown(item).map((child) => this.measure(child));
    const single = level === item && item.template.t === "fold" && !this.showsAll(item);
    const laid = layOut(
      single ? [[0]] : level.template.l!, single ? [] : level.template.d ?? [],
      single ? [] : edgesOf(level).map(([a, b]) => [a, b]), children.map((c) => ({ width: c.width, height: c.height })));
    children.forEach((child, i) => {
      child.x = laid.boxes[i].x;
      child.y = laid.boxes[i].y;
    });
    const [title, small] = this.texts(item);
    const head = textWidth(title, TITLE) + (small ? textWidth(small, SMALL) + 14 : 0) + 52 + (item.template.t === "fold" ? 150 : 0);
    const root = item === this.program.root;
    return {
      item, laid, children, x: 0, y: 0,
      width: Math.ceil(Math.max(laid.width + 2 * PAD, root ? 0 : Math.min(head, 460))),
      height: Math.ceil(laid.height + 2 * PAD + 10 + (root ? 0 : HEADER)),
    };
  }

  private texts(item: Item): [string, string] {
    const template = item.template;
    const type = template.v?.length ? this.program.report.types[template.v[0]] : "";
    const parts: string[] = [];
    if (template.t === "op") parts.push(item.label && item.label !== item.name ? item.label : "", type);
    else if (template.t === "in") parts.push(template.v!.length > 1 ? `${type} and ${template.v!.length - 1} more` : type);
    else if (template.t === "region") parts.push(item.label || item.name, template.w ? "by " + template.w : "");
    else if (template.t !== "out") {
      parts.push(template.t === "module" && item.label ? template.y ?? "" : "", plural(template.m[0], "op"));
    }
    const title = template.t === "fold" ? `${item.label ? "layers " + item.label : this.unitTitle(item)}  ×${count(template.n!)}` : item.title();
    return [title, parts.filter(Boolean).join(" · ")];
  }

  private unitTitle(fold: Item): string {
    const unit = fold.unit(0);
    return unit.template.t === "repeat" ? "repeated part" : unit.title();
  }

  private paint(view: View, x: number, y: number, into: SVGElement, root = false): void {
    const { item } = view;
    const opened = view.laid !== null;
    const color = this.host.color(item);
    const mark = this.host.marked?.(item) ?? null;
    const names = ["box", item.template.t, opened ? "open" : "", color === null ? "" : "kind k" + color, mark ?? ""];
    const [title, small] = this.texts(item);
    const group = s("g", {
      class: names.filter(Boolean).join(" "), transform: `translate(${x} ${y})`, "data-id": item.id,
      role: root ? null : "treeitem", "aria-expanded": item.leaf || root ? null : String(opened),
      "aria-label": root ? null : `${item.template.t} ${title} ${small}`,
    });
    this.places.set(item.id, { ...this.absolute(x, y, into), width: view.width, height: view.height });
    this.nodes.set(item.id, group);
    into.append(group);
    if (!root) {
      if (item.template.t === "fold")
        for (const shift of [6, 3])
          group.append(s("rect", { class: "stack", x: shift, y: shift, width: view.width, height: view.height, rx: 6 }));
      group.append(s("rect", { class: "frame", width: view.width, height: view.height, rx: item.leaf ? 12 : 6 }));
      if (color !== null) group.append(s("rect", { class: "bar", width: 4, height: view.height - 8, x: 4, y: 4, rx: 2 }));
      this.header(group, view, title, small);
      group.addEventListener("click", (event) => { event.stopPropagation(); this.svg.focus({ preventScroll: true }); this.choose(item); });
      group.addEventListener("dblclick", (event) => { event.stopPropagation(); this.toggle(item); });
    }
    if (!view.laid) return;
    const top = PAD + (root ? 0 : HEADER);
    const left = (view.width - view.laid.width) / 2;
    const level = this.level(item);
    const inner = s("g", { transform: `translate(${left} ${top})` });
    group.append(inner);
    const single = view.children.length === 1 && level === item && item.template.t === "fold" && !this.showsAll(item);
    if (!single) {
      const children = this.shown(item);
      const carried = new Map(edgesOf(level).map(([a, b, size, label]) => [a + ">" + b, { size, label }]));
      for (const edge of view.laid.edges) {
        const { size, label } = carried.get(edge.from + ">" + edge.to)!;
        const width = thickness(size);
        inner.append(s("path", { class: "edge", d: curve(edge.points), "stroke-width": width,
          "data-from": children[edge.from].id, "data-to": children[edge.to].id }, s("title", {}, label)));
      }
      this.stubs(inner, view, level, children);
    }
    this.offset(inner, left, top, into, x, y);
    for (const child of view.children) this.paint(child, child.x, child.y, inner);
  }

  private header(group: SVGElement, view: View, title: string, small: string): void {
    const { item } = view;
    const opened = view.laid !== null;
    const left = 14;
    const tools = item.leaf ? 12 : 30;
    const full = [title, small, item.path()].filter(Boolean).join("\n");
    group.append(s("title", {}, full));
    if (opened) {
      const room = view.width - left - tools - (item.template.t === "fold" ? 150 : 0);
      const shown = fitted(title, room, TITLE);
      group.append(s("text", { class: "label title", x: left, y: 19 }, shown));
      const rest = room - textWidth(shown, TITLE) - 12;
      if (small && rest > 60)
        group.append(s("text", { class: "label small", x: left + textWidth(shown, TITLE) + 10, y: 19 }, fitted(small, rest, SMALL)));
      if (item.template.t === "fold") this.foldTools(group, view);
    } else {
      const room = view.width - left - tools;
      group.append(s("text", { class: "label title", x: left, y: small ? 16 : 17 }, fitted(title, room, TITLE)));
      if (small) group.append(s("text", { class: "label small", x: left, y: 30 }, fitted(small, room, SMALL)));
    }
    if (!item.leaf) {
      const at = view.width - 16;
      const middle = opened ? 15 : view.height / 2;
      const sign = opened ? `M${at - 4} ${middle}h8` : `M${at - 4} ${middle}h8M${at} ${middle - 4}v8`;
      const toggle = s("g", { class: "toggle", role: "button", "aria-label": opened ? "close" : "open" },
        s("rect", { x: at - 9, y: middle - 9, width: 18, height: 18, rx: 4 }), s("path", { d: sign }));
      toggle.addEventListener("click", (event) => { event.stopPropagation(); this.toggle(item); });
      group.append(toggle);
    }
  }

  /** Which of the equal units is shown, and a way to see them all. */
  private foldTools(group: SVGElement, view: View): void {
    const { item } = view;
    const right = view.width - 34;
    const tool = (text: string, end: number, label: string, action: () => void) => {
      const width = textWidth(text, SMALL) + 10;
      const element = s("g", { class: "tool", role: "button", "aria-label": label, transform: `translate(${end - width} 6)` },
        s("rect", { width, height: 18, rx: 4 }), s("text", { class: "label small", x: 5, y: 13 }, text), s("title", {}, label));
      element.addEventListener("click", (event) => { event.stopPropagation(); action(); });
      group.append(element);
      return end - width - 4;
    };
    const all = this.showsAll(item);
    let end = tool(all ? "fold" : "unfold", right, all ? "show one for all" : "show each of them", () => this.showAll(item, !all));
    if (all) return;
    const unit = this.unitOf(item);
    end = tool("›", end, "next", () => this.showUnit(item, unit + 1));
    end = tool(item.unit(unit).label || String(unit + 1), end, "the one that is shown", () => this.showUnit(item, unit + 1));
    tool("‹", end, "previous", () => this.showUnit(item, unit - 1));
  }

  /** Marks where values come in from outside of a level, and where they leave it. */
  private stubs(inner: SVGElement, view: View, level: Item, children: Item[]): void {
    if (level === this.program.root) return;
    children.forEach((child, i) => {
      const box = view.laid!.boxes[i];
      const outside = child.refs().map((ref, k) => [ref, k] as const).filter(([ref]) => typeof ref === "number" && ref < 0);
      if (outside.length) {
        const sources = outside.map(([, k]) => sourceName(child.operand(k)));
        const at = box.x + Math.min(box.width - 12, 24);
        inner.append(s("g", { class: "stub" }, s("path", { d: `M${at} ${box.y - 9}V${box.y}` }), s("circle", { cx: at, cy: box.y - 10, r: 2.5 }),
          s("title", {}, "from outside: " + sources.join(", "))));
      }
      if ((level.template.o ?? []).some(([from]) => from === i)) {
        const at = box.x + Math.max(12, box.width - 24);
        const bottom = box.y + box.height;
        inner.append(s("g", { class: "stub" }, s("path", { d: `M${at} ${bottom}v9` }), s("circle", { cx: at, cy: bottom + 10, r: 2.5 }),
          s("title", {}, "used outside")));
      }
    });
  }

  private origins = new WeakMap<SVGElement, { x: number; y: number }>();

  private absolute(x: number, y: number, into: SVGElement): { x: number; y: number } {
    const origin = this.origins.get(into) ?? { x: 0, y: 0 };
    return { x: origin.x + x, y: origin.y + y };
  }

  private offset(inner: SVGElement, left: number, top: number, into: SVGElement, x: number, y: number): void {
    const at = this.absolute(x, y, into);
    this.origins.set(inner, { x: at.x + left, y: at.y + top });
  }

  // Pan and zoom.

  /** Draws the whole program in a page of paper, or what is on the screen again. */
  print(on: boolean): void {
    if (on) {
      this.svg.setAttribute("viewBox", `-4 0 ${this.view.width + 8} ${this.view.height}`);
      this.svg.setAttribute("preserveAspectRatio", "xMidYMin meet");
      this.stage.removeAttribute("transform");
    } else {
      this.svg.removeAttribute("viewBox");
      this.transform();
    }
  }

  private transform(): void {
    this.stage.setAttribute("transform", `translate(${this.x} ${this.y}) scale(${this.scale})`);
  }

  place(x: number, y: number, scale: number): void {
    this.x = x;
    this.y = y;
    this.scale = scale;
    this.stage.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
  }

  pan(dx: number, dy: number): void {
    this.x += dx;
    this.y += dy;
    this.transform();
  }

  private move(dx: number, dy: number): void {
    this.pan(dx, dy);
    this.host.panned?.(this, dx, dy);
  }

  zoom(factor: number, cx = this.svg.clientWidth / 2, cy = this.svg.clientHeight / 2, report = true): void {
    const scale = Math.min(3, Math.max(0.05, this.scale * factor));
    this.x = cx - ((cx - this.x) * scale) / this.scale;
    this.y = cy - ((cy - this.y) * scale) / this.scale;
    this.scale = scale;
    this.transform();
    if (report) this.host.zoomed?.(this, factor, cx, cy);
  }

  /** Shows the whole program, or as much of it as can still be read, from the top. */
  fit(whole = false): void {
    const width = this.svg.clientWidth;
    const height = this.svg.clientHeight;
    if (!width || !height) return;
    const scale = Math.min((width - 24) / this.view.width, (height - 24) / this.view.height, 1.15);
    this.scale = Math.max(whole ? 0.05 : width < 640 ? 0.55 : 0.72, scale);
    this.x = (width - this.view.width * this.scale) / 2;
    this.y = Math.max(12, (height - this.view.height * this.scale) / 2);
    this.transform();
  }

  center(item: Item): void {
    const place = this.places.get(item.id);
    if (!place) return;
    const width = this.svg.clientWidth;
    const height = this.svg.clientHeight;
    if (this.scale < 0.6) this.scale = 0.9;
    this.x = width / 2 - (place.x + place.width / 2) * this.scale;
    this.y = place.height * this.scale < height - 60 ? height / 2 - (place.y + place.height / 2) * this.scale : 40 - place.y * this.scale;
    this.transform();
  }

  private ensureVisible(item: Item): void {
    const place = this.places.get(item.id);
    if (!place) return;
    const left = place.x * this.scale + this.x;
    const top = place.y * this.scale + this.y;
    if (left < 0 || top < 0 || left + 60 > this.svg.clientWidth || top + 40 > this.svg.clientHeight) this.center(item);
  }

  private wheel(event: WheelEvent): void {
    event.preventDefault();
    const frame = this.svg.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(-event.deltaY * 0.004), event.clientX - frame.left, event.clientY - frame.top);
    else this.move(event.shiftKey ? -event.deltaY : -event.deltaX, event.shiftKey ? 0 : -event.deltaY);
  }

  private drag(): void {
    let from: [number, number] | null = null;
    let moved = false;
    this.svg.addEventListener("pointerdown", (event) => {
      const e = event as PointerEvent;
      if (e.button === 0) { from = [e.clientX, e.clientY]; moved = false; }
    });
    window.addEventListener("pointermove", (event) => {
      if (!from) return;
      if (!moved && Math.abs(event.clientX - from[0]) + Math.abs(event.clientY - from[1]) < 4) return;
      moved = true;
      this.svg.classList.add("dragging");
      this.move(event.clientX - from[0], event.clientY - from[1]);
      from = [event.clientX, event.clientY];
    });
    window.addEventListener("pointerup", () => { from = null; this.svg.classList.remove("dragging"); });
    this.svg.addEventListener("click", (event) => {
      if (moved) { moved = false; event.stopPropagation(); event.preventDefault(); }
    }, true);
    this.svg.addEventListener("click", () => this.choose(null));
  }

  private key(event: KeyboardEvent): void {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const item = this.selected;
    const moves: Record<string, () => void> = {
      "+": () => this.zoom(1.25), "=": () => this.zoom(1.25), "-": () => this.zoom(0.8), "0": () => this.fit(true),
      ArrowDown: () => this.step(item, "down"), ArrowUp: () => this.step(item, "up"),
      ArrowLeft: () => this.step(item, "left"), ArrowRight: () => this.step(item, "right"),
      Enter: () => { if (item) this.toggle(item); },
      Escape: () => this.back(),
      "[": () => this.leaf(item, -1), "]": () => this.leaf(item, 1), u: () => this.leaf(item, 0),
    };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    move();
  }

  /** Shows another one of the equal layers that the selection is in, or with 0 all of them or one. */
  private leaf(item: Item | null, by: number): void {
    const fold = item && [item, ...item.ancestors()].find((a) => a.template.t === "fold" && this.places.has(a.id));
    if (!fold) return;
    if (by) this.showUnit(fold, this.unitOf(fold) + by);
    else this.showAll(fold, !this.showsAll(fold));
    this.choose(fold);
    this.ensureVisible(fold);
  }

  /** Closes what is selected, or selects what it is in. */
  private back(): void {
    const item = this.selected;
    if (!item) return;
    if (this.isOpen(item) && !item.leaf) this.toggle(item, false);
    else {
      const around = item.ancestors().find((a) => this.places.has(a.id) && a !== this.program.root);
      this.choose(around ?? null);
      if (around) this.ensureVisible(around);
    }
  }

  /** Selects the nearest box in a direction, in the same level first. */
  private step(item: Item | null, direction: "up" | "down" | "left" | "right"): void {
    const candidates = [...this.places.entries()].filter(([id]) => id !== this.program.root.id && id !== item?.id);
    if (!item || !this.places.has(item.id)) {
      const first = this.program.root.children().find((c) => this.places.has(c.id));
      if (first) { this.choose(first); this.ensureVisible(first); }
      return;
    }
    const from = this.places.get(item.id)!;
    const ax = from.x + from.width / 2;
    const ay = from.y;
    let best: string | null = null;
    let least = Infinity;
    for (const [id, place] of candidates) {
      const dx = place.x + place.width / 2 - ax;
      const dy = place.y - ay;
      const along = direction === "down" ? dy : direction === "up" ? -dy : direction === "right" ? dx : -dx;
      const across = direction === "down" || direction === "up" ? Math.abs(dx) : Math.abs(dy);
      if (along <= 2) continue;
      const distance = along + 2 * across;
      if (distance < least) { least = distance; best = id; }
    }
    const target = best && this.visible(best);
    if (target) { this.choose(target); this.ensureVisible(target); }
  }

  private visible(id: string): Item | null {
    const stack: View[] = [this.view];
    while (stack.length) {
      const view = stack.pop()!;
      if (view.item.id === id) return view.item;
      stack.push(...view.children);
    }
    return null;
  }

  focus(): void {
    this.svg.focus({ preventScroll: true });
  }
}

function unitIndex(fold: Item, inside: Item): number {
  return Math.floor((inside.offset - fold.offset) / fold.template.z!);
}

const edges = new WeakMap<Item, [number, number, number, string][]>();

/** Edges among the boxes of a level: from, to, bytes, and what they carry in words. */
export function edgesOf(level: Item): [number, number, number, string][] {
  let known = edges.get(level);
  if (known) return known;
  const sums = new Map<string, { size: number; names: string[]; seen: Set<string> }>();
  const children = level.children();
  level.template.c!.forEach(([, refs], to) => {
    for (const ref of refs) {
      if (typeof ref === "string") continue;
      const [from, place] = Array.isArray(ref) ? ref : [ref, 0];
      if (from < 0) continue;
      const key = from + ">" + to;
      let sum = sums.get(key);
      if (!sum) sums.set(key, (sum = { size: 0, names: [], seen: new Set() }));
      if (sum.seen.has(String(place))) continue;
      sum.seen.add(String(place));
      const source = children[from].result(place);
      sum.size += sourceBytes(source);
      sum.names.push(sourceName(source));
    }
  });
  known = [...sums].map(([key, { size, names }]) => {
    const [from, to] = key.split(">").map(Number);
    return [from, to, size, `${names.join(", ")}: ${bytes(size)}`];
  });
  edges.set(level, known);
  return known;
}

export function thickness(size: number): number {
  return size <= 0 ? 1 : Math.min(9, Math.max(1.1, 1 + (Math.log2(size) - 9) * 0.42));
}
