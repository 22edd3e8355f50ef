// The page: a header with the key figures, and a view for each question.

import { assign } from "./colors";
import { Compare } from "./compare";
import { details, section } from "./details";
import { bytes, clear, count, h, plural, s } from "./dom";
import { Item, Program, ReportData } from "./model";
import { Pane, thickness } from "./program";
import { costRows, decisionsView, select, timeView } from "./tables";

const report: ReportData = JSON.parse(document.getElementById("data")!.textContent!);
const programs = report.graphs.map((data, i) => new Program(report, data, "a" + i));
const others = report.other.map((data, i) => new Program(report, data, "b" + i));
const kinds = unionOf([...programs, ...others].flatMap((p) => Object.keys(p.root.template.k ?? {})));
const places = assign(kinds);
const backends = unionOf(report.templates.map((t) => t.w).filter((w): w is string => !!w));
const backendPlaces = assign([...backends, "not lowered"]);
let byBackend = false;
let current = 0;
let view = "program";

const root = document.getElementById("report")!;
const tabs = new Map<string, HTMLButtonElement>();
const bodies = new Map<string, HTMLElement>();
const panel = h("aside", { class: "panel", "aria-label": "details" });
const sidebar = h("nav", { class: "sidebar", "aria-label": "overview" });
const stage = h("div", { class: "center" });
const results = h("div", { class: "results", role: "listbox", id: "results" });
const search = h("input", { type: "search", class: "search", placeholder: "Search  ( / )", "aria-label": "search operations, regions, modules and kinds",
  role: "combobox", "aria-expanded": "false", "aria-controls": "results", autocomplete: "off", spellcheck: "false" });
const help = h("dialog", { class: "help", "aria-label": "keys" });
let pane: Pane;
let compare: Compare | null = null;

const swatch = (kind: string): HTMLElement => h("span", { class: "swatch " + (places.has(kind) ? "k" + places.get(kind) : "none"), "aria-hidden": "true" });

function unionOf(names: string[]): string[] {
  return [...new Set(names)];
}

function color(item: Item): number | null {
  if (item.template.t !== "region") return null;
  return byBackend ? backendPlaces.get(item.template.w ?? "not lowered")! : places.get(item.template.r!)!;
}

function show(program: Program, item: Item): void {
  const index = programs.indexOf(program);
  if (index < 0) { choose(item); return; }
  if (index !== current) { current = index; build(); }
  open("program");
  pane.reveal(item);
  pane.focus();
}

const host = { show, swatch };

function choose(item: Item | null): void {
  clear(panel);
  if (item) panel.append(details(item, host));
  else panel.append(overview());
  panel.scrollTop = 0;
}

function overview(): HTMLElement {
  const program = programs[current];
  const rows = costRows(program);
  const sums = new Map<string, { item: Item; n: number; bytes: number }>();
  for (const row of rows) {
    if (row.kind) continue;
    const name = row.item.title();
    const sum = sums.get(name) ?? { item: row.item, n: 0, bytes: 0 };
    sums.set(name, { item: sum.item, n: sum.n + row.times, bytes: sum.bytes + row.totals[3] * row.times });
  }
  const loose = [...sums].sort((a, b) => b[1].bytes - a[1].bytes).slice(0, 10);
  const [operations, fused] = program.root.template.m;
  return h("div", { class: "details" }, h("div", { class: "eyebrow" }, "program"), h("h2", {}, program.root.title()),
    h("p", {}, `${count(fused)} of ${plural(operations, "operation")} are in regions.`),
    loose.length ? section("In no region, by the bytes they move", h("ul", { class: "list" }, ...loose.map(([name, sum]) =>
      h("li", { class: "split" }, h("button", { type: "button", class: "link", onclick: () => show(program, sum.item) }, name), h("span", { class: "muted" }, ` ×${count(sum.n)}, ${bytes(sum.bytes)}`))))) : null,
    h("p", { class: "muted" }, "Select a box to see its line of the model, its body and its costs. Double-click or Enter opens it; dots mark values from and to the outside of a part."));
}

/** What stands out, each with a way there. */
function findings(): HTMLElement {
  const program = programs[current];
  const rows = program.data.findings.map((f) => {
    const target = f.at.map((name) => place(program, name)).find((item) => item);
    return h("li", { class: "finding " + f.sort }, target ? h("button", { type: "button", class: "link", onclick: () => show(program, target) }, f.text) : f.text);
  });
  return h("section", {}, h("h3", {}, "What stands out"), rows.length ? h("ul", { class: "findings" }, ...rows) : h("p", { class: "muted" }, Object.keys(program.root.template.k ?? {}).length ? "Nothing: equal layers are fused alike." : "Nothing was fused."));
}

/** The item of a module's path, or of an operation or a region by name. */
function place(program: Program, name: string): Item | null {
  return name.startsWith("module:") ? program.module(name.slice(7)) : program.find(name);
}

function legend(): HTMLElement {
  const program = programs[current];
  const byKind = h("button", { type: "button", "aria-pressed": String(!byBackend), onclick: () => recolor(false) }, "kind");
  const other = h("button", { type: "button", "aria-pressed": String(byBackend), onclick: () => recolor(true) }, "backend");
  const rows = byBackend
    ? [...backends, "not lowered"].map((name) => h("li", {}, h("span", { class: "swatch k" + backendPlaces.get(name) }), name))
    : Object.entries(program.root.template.k ?? {}).sort((a, b) => b[1] - a[1]).map(([kind, n]) =>
        h("li", {}, swatch(kind), h("button", { type: "button", class: "link", onclick: () => first(kind) }, kind), h("span", { class: "muted" }, " ×" + n)));
  return h("section", { class: "legend" }, h("h3", {}, "Regions by ", h("span", { class: "switch", role: "group" }, byKind, other)),
    rows.length ? h("ul", {}, ...rows) : h("p", { class: "muted" }, "There are no regions."),
    h("h3", {}, "Edges by the bytes they carry"),
    h("div", { class: "edge-key muted" }, ...[1 << 10, 1 << 20, 1 << 30].map((size) => h("span", {},
      s("svg", { width: 16, height: 12, "aria-hidden": "true" }, s("path", { class: "edge", d: "M0 6H16", "stroke-width": thickness(size) })), bytes(size).replace(/\.0+ /, " ")))));
}

function recolor(backend: boolean): void {
  byBackend = backend;
  side();
  pane.draw();
  compare?.shown();
}

/** Goes to the first region of a kind, or to the next one after the selected. */
function first(kind: string): void {
  const found: Item[] = [];
  const stack = [programs[current].root];
  while (stack.length && found.length < 500) {
    const item = stack.pop()!;
    if (item.template.r === kind) found.push(item);
    else if (item.template.k?.[kind]) stack.push(...item.children().slice().reverse());
  }
  const at = found.findIndex((item) => item.id === pane.selected?.id);
  const next = found[(at + 1) % found.length];
  if (next) show(programs[current], next);
}

function side(): void {
  clear(sidebar);
  sidebar.append(findings(), legend());
  const program = programs[current];
  const listed = (title: string, texts: string[]) => texts.length ? h("section", {}, h("h3", {}, title), h("ul", { class: "findings" }, ...texts.map((t) => h("li", {}, t)))) : null;
  const extra = [listed("Fell back", program.data.fell_back), listed("Diagnostics", program.data.diagnostics)];
  sidebar.append(...extra.filter((e): e is HTMLElement => !!e));
}

function find(text: string): { item: Item; title: string; more: string }[] {
  const wanted = text.toLowerCase();
  const program = programs[current];
  const found: { item: Item; title: string; more: string; rank: number }[] = [];
  const seen = new Set<string>();
  const add = (item: Item, title: string, more: string, rank: number) => {
    if (!seen.has(item.id)) { seen.add(item.id); found.push({ item, title, more, rank }); }
  };
  // What is called so exactly comes first, wherever it is: the searches below end early in a large program.
  const exact = [program.find(text), text.includes(".") ? program.module(text) : null];
  for (const item of exact) if (item && (item.named ? item.name : item.path()) === text) add(item, text, item.template.r ?? item.template.p ?? item.template.y ?? "", 0);
  const stack = [program.root];
  for (let steps = 0; stack.length && steps < 30000 && found.length < 400; steps++) {
    const item = stack.pop()!;
    const title = item.title().toLowerCase();
    if (!item.leaf && item.parent) {
      const path = item.path();
      if (title.includes(wanted)) add(item, item.template.t === "region" ? item.name : path || item.title(), item.template.r ?? item.template.y ?? "", title === wanted ? 1 : 2);
      else if (path.toLowerCase().endsWith(wanted)) add(item, path, item.template.y ?? item.template.r ?? "", 2);
      if (item.template.t === "fold" && item.template.n! > 64 ) { stack.push(item.unit(0)); continue; }
    }
    stack.push(...item.children().filter((c) => !c.leaf).reverse());
  }
  let hits = 0;
  for (let slot = 0; slot < program.names.length && hits < 60; slot++) {
    const name = program.names[slot].toLowerCase();
    if (!name.includes(wanted)) continue;
    const item = program.at(slot);
    if (item) { hits++; add(item, item.name, item.template.r ?? item.template.p ?? "", name === wanted ? 0 : name.startsWith(wanted) ? 1 : 3); }
  }
  return found.sort((a, b) => a.rank - b.rank || a.title.length - b.title.length).slice(0, 30);
}

function runSearch(): void {
  clear(results);
  const text = search.value.trim();
  search.setAttribute("aria-expanded", String(!!text));
  results.classList.toggle("shown", !!text);
  if (!text) return;
  const found = find(text);
  if (!found.length) results.append(h("p", { class: "muted" }, "Nothing matches."));
  found.forEach(({ item, title, more }, i) => {
    const path = item.path();
    results.append(h("button", { type: "button", role: "option", class: i ? "" : "first", onclick: () => { show(programs[current], item); closeSearch(); } },
      item.template.r ? swatch(item.template.r) : null, h("span", { class: "name" }, title), h("span", { class: "muted" }, " " + more), path && path !== title ? h("span", { class: "path" }, path) : null));
  });
}

function closeSearch(): void {
  search.value = "";
  runSearch();
}

search.addEventListener("input", runSearch);
search.addEventListener("keydown", (event) => {
  const options = [...results.querySelectorAll("button")];
  if (event.key === "Enter") options[0]?.click();
  else if (event.key === "Escape") { closeSearch(); pane.focus(); }
  else if (event.key === "ArrowDown") { event.preventDefault(); options[0]?.focus(); }
});
results.addEventListener("keydown", (event) => {
  const options = [...results.querySelectorAll("button")];
  const at = options.indexOf(document.activeElement as HTMLButtonElement);
  if (event.key === "ArrowDown") { event.preventDefault(); options[Math.min(options.length - 1, at + 1)]?.focus(); }
  else if (event.key === "ArrowUp") { event.preventDefault(); (options[at - 1] ?? search).focus(); }
  else if (event.key === "Escape") { closeSearch(); pane.focus(); }
});
document.addEventListener("click", (event) => {
  if (!(event.target as Element).closest(".search-box")) results.classList.remove("shown");
});
document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const number = [...tabs.keys()][Number(event.key) - 1];
  if (event.key === "/") { event.preventDefault(); search.focus(); }
  else if (event.key === "?") help.showModal();
  else if (number) open(number);
});

function open(name: string): void {
  view = name;
  for (const [key, tab] of tabs) {
    tab.setAttribute("aria-selected", String(key === name));
    tab.tabIndex = key === name ? 0 : -1;
  }
  for (const [key, body] of bodies) body.hidden = key !== name;
  panel.hidden = name !== "program";
  sidebar.hidden = name !== "program";
  root.dataset.view = name;
  if (name === "compare" && !compare) {
    const comparison = report.comparisons[current];
    compare = new Compare([programs[current], others[comparison.other]], comparison, { color, select: (_, item) => { choose(item); panel.hidden = !item; } });
    bodies.get("compare")!.append(compare.element);
    compare.shown();
  }
  if (name === "decisions" && !bodies.get(name)!.childNodes.length) bodies.get(name)!.append(decisionsView(programs[current], host));
  if (name === "time" && !bodies.get(name)!.childNodes.length) bodies.get(name)!.append(timeView(programs[current], host));
}

/** Makes the views of the program that is chosen; those that are not open yet when they are opened. */
function build(): void {
  for (const body of bodies.values()) clear(body);
  compare = null;
  const program = programs[current];
  pane = new Pane(program, { color, select: (_, item) => choose(item) }, "the program: arrow keys move, Enter opens, Escape goes back");
  bodies.get("program")!.append(pane.element);
  side();
  choose(null);
  figures();
}

const keyFigures = h("div", { class: "figures" });

function figures(): void {
  clear(keyFigures);
  for (const [label, value, more] of programs[current].data.figures)
    keyFigures.append(h("div", { class: "figure" }, h("span", { class: "value" }, value), h("span", { class: "label" }, label), more ? h("span", { class: "more" }, more) : null));
}

function header(): HTMLElement {
  const names: [string, string][] = [["program", "Program"], ["decisions", "Decisions"], ["time", "Time and bytes"]];
  if (report.comparisons.length) names.push(["compare", "Compare"]);
  const list = h("div", { class: "tabs", role: "tablist" });
  for (const [key, text] of names) {
    const tab = h("button", { type: "button", role: "tab", id: "tab-" + key, "aria-controls": "view-" + key, onclick: () => open(key),
      onkeydown: (event: KeyboardEvent) => {
        const all = [...tabs.keys()];
        const to = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
        if (to) { const next = all[(all.indexOf(key) + to + all.length) % all.length]; open(next); tabs.get(next)!.focus(); }
      } }, text);
    tabs.set(key, tab);
    list.append(tab);
    const body = h("div", { class: "view", role: "tabpanel", id: "view-" + key, "aria-labelledby": "tab-" + key });
    bodies.set(key, body);
    stage.append(body);
  }
  const graphs = select("graph", report.graphs.map((g) => g.label));
  graphs.addEventListener("change", () => { current = graphs.selectedIndex; build(); open(view); pane.fit(); });
  for (const [keys, what] of [["/", "search"], ["1 – 4", "views"], ["arrows", "move the selection"], ["Enter", "open or close"], ["[ ]", "the previous or next of equal layers"], ["u", "unfold equal layers, or fold them"], ["Esc", "close, go back"], ["+ −", "zoom"], ["0", "show all"], ["?", "this help"], ["drag, wheel", "move the drawing; with Ctrl, zoom"]] as const)
    help.append(h("div", { class: "key-row" }, h("kbd", {}, keys), h("span", {}, what)));
  help.append(h("form", { method: "dialog" }, h("button", {}, "Close")));
  return h("header", {},
    h("div", { class: "top" }, h("h1", {}, report.title), programs.length > 1 ? graphs : null, list,
      h("div", { class: "search-box" }, search, results), h("button", { type: "button", class: "plain", "aria-label": "keys", title: "keys (?)", onclick: () => help.showModal() }, "?")),
    keyFigures);
}

root.append(header(), h("main", {}, sidebar, stage, panel), h("footer", {}, report.about), help);
build();
open("program");
pane!.draw();
pane!.fit();
root.dataset.ready = "true";
for (const [event, on] of [["beforeprint", true], ["afterprint", false]] as const)
  addEventListener(event, () => { pane.print(on); compare?.print(on); });
let resizing = 0;
addEventListener("resize", () => { cancelAnimationFrame(resizing); resizing = requestAnimationFrame(() => { if (view === "program" && !pane.selected) pane.fit(); }); });
