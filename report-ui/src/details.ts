// What is selected, in words: where it comes from, what it computes, what it costs and who runs it.

import { Item, Program, Source, sourceName, sourceType, shortTarget } from "./model";
import { bytes, count, h, percent, plural, seconds } from "./dom";
import { reasonsApart } from "./apart";

export interface DetailsHost {
  show(program: Program, item: Item): void;
  swatch(kind: string): HTMLElement;
}

const MOST_LINES = 400;
const MOST_SHOWN = 12;

export function details(item: Item, host: DetailsHost): HTMLElement {
  const template = item.template;
  const panel = h("div", { class: "details" });
  const kind = template.t === "region" ? "region" : template.t === "op" ? "operation" : template.t === "in" ? "input" : template.t === "out" ? "output" : template.t === "fold" ? "repeated" : template.t === "chunk" || template.t === "repeat" ? "part" : "module";
  panel.append(h("div", { class: "eyebrow" }, template.t === "region" ? host.swatch(template.r!) : null, kind));
  panel.append(h("h2", {}, item.heading()));
  const rows: [string, Node | string | null][] = [];
  if (template.t === "region") {
    rows.push(["kind", template.r! + (template.x ? ` v${template.x}` : "")]);
    rows.push(["run by", template.w ?? "its operations, as they are (not lowered)"]);
    if (template.q) rows.push(["rule", `${template.q}, round ${template.n ?? 1}`]);
  }
  if (template.t === "op") rows.push(["calls", h("code", {}, template.p!)]);
  const path = item.path();
  if (path && template.t !== "in") rows.push(["module", h("code", {}, path)]);
  if (template.t === "module" && template.y) rows.push(["class", template.y]);
  if (template.t === "fold") rows.push(["repeats", `${count(template.n!)} equal parts`]);
  if (template.v) template.v.forEach((type, i) => rows.push([i ? "" : template.t === "out" ? "" : template.v!.length > 1 ? "results" : "result", h("code", {}, item.program.report.types[type])]));
  if (template.t === "region") rows.push(["results", h("code", {}, template.o!.map((_, k) => sourceType(item.result(k))).join(", ") || "none")]);
  const measured = template.t === "region" ? measuredTime(item) : null;
  if (measured) rows.push(["time", measured]);
  rows.push(...costs(item));
  panel.append(facts(rows));
  panel.append(...source(item));
  const others = item.template.t === "region" ? item.program.data.measured.find((m) => m.region === item.name)?.alternatives ?? [] : [];
  if (others.length) panel.append(section("What the plan had instead", list(others.map((text) => h("span", {}, text)))));
  if (template.t === "region") {
    panel.append(section("Body", code(pythonOf(item))));
    const attrs = template.h && template.h !== "{}" ? Object.entries(JSON.parse(template.h)) : [];
    if (attrs.length) panel.append(section("Attributes", facts(attrs.map(([k, v]) => [k, h("code", {}, JSON.stringify(v))]))));
    panel.append(section("Key", h("code", { class: "wrap" }, template.e!)));
  }
  if (item.leaf || template.t === "region") {
    const operands = item.operands();
    if (operands.length) panel.append(section("Reads", list(operands.map((o) => operand(o, host)))));
    const readers = neighbors(item);
    if (readers.length) panel.append(section("Read by", list(readers.map((r) => apartLine(item, r, host)))));
    const producers = template.t === "op" ? operands.filter((o) => o.item && o.item.template.t === "op").map((o) => o.item!) : [];
    const apart = producers.map((p) => [p, reasonsApart(p, item)] as const).filter(([, r]) => r.length);
    if (apart.length) panel.append(section("Why not with what it reads", list(apart.map(([p, r]) => why(p, r, host)))));
  } else {
    const kinds = Object.entries(template.k ?? {}).sort((a, b) => b[1] - a[1]);
    if (kinds.length) panel.append(section("Regions inside", list(kinds.map(([name, n]) => h("span", {}, host.swatch(name), `${name} ×${n}`)))));
    panel.append(section("Inside", list(item.children().slice(0, MOST_SHOWN).map((c) => link(c, host)))));
  }
  return panel;
}

function measuredTime(item: Item): string | null {
  const entry = item.program.data.measured.find((m) => m.region === item.name);
  return entry ? `${seconds(entry.seconds)} measured (${entry.source})` : null;
}

function costs(item: Item): [string, string | null][] {
  if (item.template.t === "in" || item.template.t === "out") return [];
  const [operations, fused, flops, before, after, launches, launchesAfter] = item.template.m;
  if (item.template.t === "op") {
    const [read, written] = item.template.b!;
    return [operations ? ["", null] : ["copy", "computed again: another copy of it is counted"], ["moves", read || written ? `${bytes(read)} read, ${bytes(written)} written (modelled)` : "nothing: a view or a size"], ["computes", flops ? count(flops) + " flop" : null]];
  }
  return [
    ["operations", item.template.t === "region" ? String(operations) : `${operations.toLocaleString("en-US")}, ${percent(fused, operations)} in regions`],
    ["moves", before === after ? `${bytes(before)} (modelled)` : `${bytes(before)} → ${bytes(after)} (modelled)`],
    ["launches", launches === launchesAfter ? String(launches) : `${count(launches)} → ${count(launchesAfter)}`],
    ["computes", flops ? count(flops) + " flop" : null],
  ];
}

/** The lines of the model's source that an operation, or those of a region, come from. */
function source(item: Item): Node[] {
  const places = new Map<number, number>();
  const stack = [item];
  let seen = 0;
  while (stack.length && seen++ < 500) {
    const at = stack.pop()!;
    if (at.template.s !== undefined) places.set(at.template.s, (places.get(at.template.s) ?? 0) + 1);
    else if (item.template.t === "region" || at === item) stack.push(...at.children().slice().reverse());
  }
  if (!places.size || (!item.leaf && item.template.t !== "region")) return [];
  const { files, places: all, lines } = item.program.report.sources;
  const blocks: Node[] = [];
  const order = [...places.keys()].sort((a, b) => all[a][0] - all[b][0] || all[a][1] - all[b][1]);
  for (const [file, members] of grouped(order, (p) => String(all[p][0]))) {
    const numbers = new Set(members.map((p) => all[p][1]));
    const shown = new Set<number>();
    for (const n of numbers) for (let i = n - (numbers.size > 3 ? 0 : 2); i <= n + (numbers.size > 3 ? 0 : 2); i++) if (lines[file]?.[i] !== undefined) shown.add(i);
    const name = files[Number(file)];
    const rows = [...shown].sort((a, b) => a - b);
    const indent = Math.min(...rows.map((n) => lines[file][n].search(/\S/)));
    blocks.push(h("div", { class: "place", title: name }, `${name.split("/").slice(-2).join("/")}:${[...numbers].join(", ")}`, h("span", { class: "muted" }, " in " + all[members[0]][2])));
    const block = h("pre", { class: "source" });
    let previous = 0;
    for (const n of rows) {
      if (previous && n > previous + 1) block.append(h("span", { class: "gap" }, "⋯\n"));
      block.append(h("span", { class: numbers.has(n) ? "line hit" : "line" }, h("span", { class: "number" }, String(n).padStart(4) + " "), lines[file][n].slice(indent) + "\n"));
      previous = n;
    }
    blocks.push(block);
  }
  return [section("Line of the model", ...blocks)];
}

function grouped(items: number[], key: (item: number) => string): Map<string, number[]> {
  const groups = new Map<string, number[]>();
  for (const item of items) {
    const known = groups.get(key(item));
    if (known) known.push(item);
    else groups.set(key(item), [item]);
  }
  return groups;
}

/** The body of a region as a Python function. */
export function pythonOf(region: Item): string {
  const lines: string[] = [];
  const names = new Map<string, string>();
  const parameters: string[] = [];
  const sourceKey = (source: Source) => (source.item ? source.item.id + ":" + source.place : "w:" + source.weight);
  const taken = new Set(region.operands().map((o) => (o.item ? identifier(sourceName(o)) : "")));
  for (const source of region.operands()) {
    // A weight by the last parts of its path, as many as it takes to be unlike the others.
    const parts = source.item ? [sourceName(source)] : source.weight!.split(".");
    let count = source.item ? 1 : Math.min(2, parts.length);
    while (!source.item && count < parts.length && taken.has(identifier(parts.slice(-count).join("_")))) count++;
    const name = identifier(parts.slice(-count).join("_"));
    taken.add(name);
    names.set(sourceKey(source), name);
    parameters.push(name);
  }
  const write = (item: Item, indent: string): void => {
    if (lines.length > MOST_LINES) return;
    if (!item.leaf) {
      if (item.template.t === "region") lines.push(`${indent}# region ${item.name} (${item.template.r})`);
      for (const child of item.children()) write(child, indent);
      return;
    }
    const arguments_ = item.template.a!.replace(/¤(\d+)/g, (whole, k) => {
      const source = item.operand(Number(k));
      if (!source) return whole;
      return names.get(sourceKey(source)) ?? identifier(source.item ? sourceName(source) : source.weight!);
    });
    const results = item.template.v!.map((_, k) => (item.template.v!.length > 1 ? `${item.name}_${k}` : item.name));
    results.forEach((name, k) => names.set(item.id + ":" + k, identifier(name)));
    lines.push(`${indent}${results.map(identifier).join(", ")} = ${item.template.p!.replace(/\.default$/, "")}(${arguments_})`);
  };
  for (const child of region.children()) write(child, "    ");
  if (lines.length > MOST_LINES) lines.push("    ...");
  const returned = region.template.o!.map((_, k) => region.result(k)).map((source) => names.get(sourceKey(source)) ?? sourceName(source));
  const head = `def ${identifier(region.name)}(${parameters.join(", ")}):`;
  return [head, ...lines, `    return ${returned.join(", ")}`].join("\n");
}

function identifier(name: string): string {
  return name.replace(/[^\w]/g, "_");
}

function neighbors(item: Item): Item[] {
  const readers: Item[] = [];
  const scopes = [item.parent, item.parent?.parent].filter(Boolean) as Item[];
  let inner: Item = item;
  for (const scope of scopes) {
    for (const child of scope.children()) {
      if (child === inner) continue;
      child.refs().forEach((_, k) => {
        const source = child.operand(k);
        if (source.item && (source.item === item || isInside(source.item, item)) && !readers.includes(child)) readers.push(child);
      });
    }
    inner = scope;
    if (readers.length) break;
  }
  return readers.slice(0, MOST_SHOWN);
}

function isInside(item: Item, around: Item): boolean {
  for (let at: Item | null = item; at; at = at.parent) if (at === around) return true;
  return false;
}

function operand(source: Source, host: DetailsHost): Node {
  if (!source.item) return h("span", {}, h("code", {}, source.weight!), h("span", { class: "muted" }, " weight"));
  return h("span", {}, link(source.item, host, sourceName(source)), " ", h("span", { class: "muted" }, sourceType(source)));
}

export function link(item: Item, host: DetailsHost, text = item.named ? item.name : item.title()): HTMLElement {
  return h("button", { type: "button", class: "link", onclick: () => host.show(item.program, item) }, text,
    item.template.t === "op" ? h("span", { class: "muted" }, " " + shortTarget(item.template.p!)) : item.template.t === "region" ? h("span", { class: "muted" }, " " + item.template.r!) : null);
}

function apartLine(item: Item, reader: Item, host: DetailsHost): Node {
  const reasons = reasonsApart(item, reader);
  return reasons.length ? why(reader, reasons, host) : link(reader, host);
}

function why(other: Item, reasons: string[], host: DetailsHost): Node {
  return h("div", { class: "apart" }, link(other, host), h("div", { class: "why" }, "Apart because:"), h("ul", {}, ...reasons.slice(0, 4).map((r) => h("li", {}, r))));
}

export function facts(rows: [string, Node | string | null][]): HTMLElement {
  return h("dl", {}, ...rows.filter(([, v]) => v !== null).flatMap(([k, v]) => [h("dt", {}, k), h("dd", {}, v as Node | string)]));
}

export function section(title: string, ...children: Node[]): HTMLElement {
  return h("section", {}, h("h3", {}, title), ...children);
}

function list(items: Node[]): HTMLElement {
  return h("ul", { class: "list" }, ...items.map((item) => h("li", {}, item)));
}

export function code(text: string): HTMLElement {
  return h("pre", { class: "code", tabindex: 0 }, ...text.split("\n").map((line) => h("span", { class: "line" }, line + "\n")));
}

export { plural };
