// The document that reporting/document.py writes, and walking it. A template is a level or an operation without names;
// an Item is one occurrence of it, with the offset of its names. Items are made as they are looked at.

export type Ref = number | [number, number] | string;
export type Row = [number, Ref[], string?];
/** Operations, fused, flops, bytes before and after, launches before and after. */
export type Totals = [number, number, number, number, number, number, number];

export interface Template {
  t: "op" | "in" | "out" | "region" | "module" | "chunk" | "repeat" | "fold" | "graph";
  p?: string; // what an operation calls
  a?: string; // its arguments, operands as ¤0
  v?: number[]; // types of its results
  b?: [number, number]; // bytes read and written
  s?: number; // the place in the source
  y?: string; // the class of a module
  r?: string; // the kind of a region
  h?: string; // its attributes
  e?: string; // the key of its body
  x?: number; // its version
  q?: string; // its rule
  n?: number; // its round; the number of units of a fold
  w?: string; // its backend
  u?: number; // the unit of a fold
  z?: number; // the names in a unit
  c?: Row[];
  o?: [number, number][];
  l?: number[][];
  d?: [number, number, number[]][];
  m: Totals;
  k?: Record<string, number>;
}

export interface Near { title: string; pattern: [string, number][]; graph: [string, string, number][] }
export interface Decision {
  ok: boolean; rule: string; kind: string; round: number; reason: string; nodes: string[]; size: number;
  before?: [number, number]; after?: [number, number];
  matched?: number; wanted?: number; place?: string | null; near?: number; folded?: boolean; more?: number;
}
export interface Apart { a: string; b: string; reasons: string[] }
export interface Finding { text: string; at: string[]; sort: string }
export interface Planned { scope: string; label: string; choice: string; seconds: number; runner_up: string; runner_up_seconds: number | null }
export interface Measured { region: string; seconds: number; calls: number; source: string; alternatives?: string[] }
export interface GraphData {
  label: string; root: number; names: string; figures: [string, string, string][]; findings: Finding[];
  decisions: Decision[]; left_out: number; near: Near[]; apart: Apart[]; measured: Measured[]; planned: Planned[]; fell_back: string[];
  diagnostics: string[]; modules?: Record<string, string>;
}
export interface Difference { sort: string; text: string; left: number | null; right: number | null; times: number }
export interface Comparison { other: number; left: string; right: string; differences: Difference[]; plans: string[]; same: number }
export interface ReportData {
  title: string; about: string; templates: Template[]; types: string[]; typeBytes: number[];
  sources: { files: string[]; places: [number, number, string][]; lines: Record<string, Record<string, string>> };
  graphs: GraphData[]; other: GraphData[]; comparisons: Comparison[];
}

export class Program {
  readonly names: string[];
  readonly root: Item;
  private byName: Map<string, number> | null = null;
  private sizes = new Map<number, number>();

  constructor(readonly report: ReportData, readonly data: GraphData, readonly side: string) {
    this.names = data.names.split("\n");
    this.root = new Item(this, data.root, 0, null, -1, "", side + "/");
  }

  template(number: number): Template {
    return this.report.templates[number];
  }

  /** The number of names in an occurrence of a template. Templates refer to earlier ones only. */
  size(number: number): number {
    let size = this.sizes.get(number);
    if (size === undefined) {
      const template = this.template(number);
      const own = template.t === "region" || !template.c ? 1 : 0;
      if (template.t === "fold") size = template.n! * template.z!;
      else size = own + (template.c ?? []).reduce((sum, row) => sum + this.size(row[0]), 0);
      this.sizes.set(number, size);
    }
    return size;
  }

  /** The item of an operation or a region, by name. */
  find(name: string): Item | null {
    if (!this.byName) {
      this.byName = new Map();
      this.names.forEach((text, slot) => { if (!this.byName!.has(text)) this.byName!.set(text, slot); });
    }
    const slot = this.byName.get(name) ?? this.byName.get(name.split("/").pop()!);
    return slot === undefined ? null : this.at(slot);
  }

  /** The item of a module, by its path, as far down as there are such modules. */
  module(path: string): Item | null {
    let item: Item = this.root;
    search: for (;;) {
      for (const child of item.children()) {
        const units = child.template.t === "fold" ? Array.from({ length: child.template.n! }, (_, i) => i) : [0];
        for (const unit of units) {
          const candidate = child.template.t === "fold" ? child.unit(unit) : child;
          const at = candidate.path();
          if (at === path && !candidate.leaf) return candidate;
          const inside = at ? path.startsWith(at + ".") || at === path : true;
          const deeper = !candidate.leaf && candidate.template.t !== "region";
          if (deeper && inside && (at !== item.path() || this.contains(candidate, path))) {
            item = candidate;
            continue search;
          }
        }
      }
      return item === this.root ? null : item;
    }
  }

  /** Whether a part without a label of its own has a module. */
  private contains(part: Item, path: string): boolean {
    return part.children().some((child) => {
      const at = (child.template.t === "fold" ? child.unit(0) : child).path();
      return at === path || path.startsWith(at + ".") || child.template.t === "fold";
    });
  }

  /** What corresponds to an item of another program: of the same name, or with the same operation, or the same module. */
  counterpart(other: Item): Item | null {
    if (!other.parent) return this.root;
    if (other.named) {
      const same = this.find(other.name);
      if (same && same.template.t === other.template.t && same.template.p === other.template.p && same.template.r === other.template.r) return same;
      let inner: Item = other;
      while (!inner.leaf) inner = inner.children()[0];
      const operation = this.find(inner.name);
      if (operation && operation.template.p === inner.template.p) {
        const around = operation.ancestors().find((a) => a.template.t === "region");
        return other.template.t === "region" && around ? around : operation;
      }
    }
    const path = other.template.t === "fold" ? other.unit(0).path() : other.path();
    return path ? this.module(path) : null;
  }

  /** The item whose own name is at a slot. */
  at(slot: number): Item | null {
    let item: Item = this.root;
    for (;;) {
      if (item.named && item.offset === slot) return item;
      const children = item.children();
      let low = 0;
      let high = children.length - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (children[middle].offset <= slot) low = middle;
        else high = middle - 1;
      }
      if (!children.length) return null;
      item = children[low];
    }
  }
}

export class Item {
  readonly template: Template;
  private made: Item[] | null = null;

  constructor(
    readonly program: Program, readonly number: number, readonly offset: number, readonly parent: Item | null,
    readonly index: number, readonly label: string, readonly key: string,
  ) {
    this.template = program.template(number);
  }

  get id(): string {
    return this.program.side + this.number + "@" + this.offset;
  }

  get named(): boolean {
    return this.template.t === "region" || !this.template.c;
  }

  get name(): string {
    return this.named ? this.program.names[this.offset] : "";
  }

  get leaf(): boolean {
    return !this.template.c;
  }

  /** What is in a level. The parts of equal units have equal keys, so that what is open stays open in another unit. */
  children(): Item[] {
    if (!this.made) {
      let at = this.offset + (this.template.t === "region" ? 1 : 0);
      const fold = this.template.t === "fold";
      this.made = (this.template.c ?? []).map(([number, , label], i) => {
        const key = fold && this.program.template(number).t !== "fold" ? this.key + "u/" : `${this.key}${i}/`;
        const item = new Item(this.program, number, at, this, i, label ?? "", key);
        at += this.program.size(number);
        return item;
      });
    }
    return this.made;
  }

  /** One of the equal units of a fold, through folds of folds. */
  unit(i: number): Item {
    let item: Item = this;
    let left = i;
    for (;;) {
      const children = item.children();
      if (children[0]?.template.t !== "fold") return children[left];
      const child = children.find((c) => {
        const inside = c.template.n!;
        if (left < inside) return true;
        left -= inside;
        return false;
      })!;
      item = child;
    }
  }

  /** The path of the module that it is in or is. */
  path(): string {
    const labels: string[] = [];
    for (let at: Item | null = this; at; at = at.parent)
      if (at.label && at.template.t !== "fold") labels.push(at.label);
    return labels.reverse().join(".");
  }

  ancestors(): Item[] {
    const items: Item[] = [];
    for (let at = this.parent; at; at = at.parent) items.push(at);
    return items;
  }

  refs(): Ref[] {
    return this.parent ? this.parent.template.c![this.index][1] : [];
  }

  /** Where an operand comes from: a result of an operation or an input, or the path of a weight. */
  operand(k: number): Source {
    const ref = this.refs()[k];
    if (ref === undefined || !this.parent) return { weight: "?" };
    if (typeof ref === "string") return { weight: ref.startsWith(".") ? join(this.parent.modulePath(), ref.slice(1)) : ref };
    if (Array.isArray(ref)) return this.parent.children()[ref[0]].result(ref[1]);
    return ref >= 0 ? this.parent.children()[ref].result(0) : this.parent.operand(-1 - ref);
  }

  /** The operation that computes a result. */
  result(k: number): Source {
    let item: Item = this;
    let place = k;
    while (!item.leaf) {
      const [child, output] = item.template.o![place] ?? [0, 0];
      if (child < 0) return item.operand(-1 - child);
      item = item.children()[child];
      place = output;
    }
    return { item, place };
  }

  /** The path of the module around what is in this level, from which the paths of weights are relative. */
  modulePath(): string {
    return this.path();
  }

  operands(): Source[] {
    return this.refs().map((_, k) => this.operand(k));
  }

  /** The number of results that are used outside. */
  resultCount(): number {
    return this.leaf ? this.template.v!.length : this.template.o!.length;
  }

  title(): string {
    const template = this.template;
    if (template.t === "op") return shortTarget(template.p!);
    if (template.t === "in") return template.p === "input" ? this.name : template.p!;
    if (template.t === "out") return "output";
    if (template.t === "region") return template.r!;
    if (template.t === "fold") return this.label || (template.n! > 1 ? "repeated" : "");
    if (template.t === "chunk") {
      const { names } = this.program;
      return `${names[this.offset]} … ${names[this.offset + this.program.size(this.number) - 1]}`;
    }
    if (template.t === "repeat") return this.label || "repeated part";
    if (template.t === "graph") return template.y || "program";
    return this.label || template.y || "module";
  }

  /** What stands above its details: an index alone would say little. */
  heading(): string {
    if (this.named) return this.name;
    return /^\d+$/.test(this.label) ? this.path() : this.title() || this.path();
  }

  /** How it is called in a sentence. */
  describe(): string {
    if (this.template.t === "region" || this.leaf) return this.name;
    return this.path() || this.title();
  }
}

export type Source = { item: Item; place: number; weight?: undefined } | { weight: string; item?: undefined };

export function sourceName(source: Source): string {
  if (!source.item) return source.weight!;
  return source.item.template.v!.length > 1 && source.item.template.t === "op"
    ? `${source.item.name}[${source.place}]` : source.item.name;
}

export function sourceType(source: Source): string {
  return source.item ? source.item.program.report.types[source.item.template.v![source.place]] ?? "" : "";
}

export function sourceBytes(source: Source): number {
  return source.item ? source.item.program.report.typeBytes[source.item.template.v![source.place]] ?? 0 : 0;
}

export function shortTarget(target: string): string {
  const parts = target.split(".");
  if (parts.length === 3 && (parts[2] === "default" || /^[A-Z]/.test(parts[2]) || parts[0] === "aten")) return parts[1];
  return parts.length > 1 && parts[0] === "aten" ? parts[1] : target.replace(/^(_operator|operator|torch)\./, "");
}

function join(path: string, name: string): string {
  return path ? `${path}.${name}` : name;
}
