// The decisions and the costs of a program, as tables.

import { Decision, Item, Near, Program } from "./model";
import { answer } from "./apart";
import { DetailsHost, section } from "./details";
import { bytes, clear, count, h, percent, plural, seconds } from "./dom";

const PAGE = 200;

/** The view of all candidates in order: accepted or refused, why, and what they cost before and after. */
export function decisionsView(program: Program, host: DetailsHost): HTMLElement {
  const { decisions, near } = program.data;
  const all = decisions.map((d, i) => ({ ...d, number: i + 1, module: moduleOf(program, d) }));
  const body = h("tbody");
  const summary = h("p", { class: "muted", role: "status" });
  const detail = h("div", { class: "near-miss", "aria-live": "polite" });
  const rule = select("Rule", ["all rules", ...unique(all.map((d) => d.rule))]);
  const state = select("Outcome", ["all outcomes", "accepted", "refused", "near-misses"]);
  const reason = input("Reason contains");
  const module = input("Module contains");
  const folded = h("input", { type: "checkbox", id: "folded-" + program.side });
  let shown = PAGE;
  const update = () => {
    const rows = all.filter((d) =>
      (rule.value.startsWith("all ") || d.rule === rule.value) &&
      (state.value.startsWith("all ") || (state.value === "accepted" ? d.ok : state.value === "refused" ? !d.ok : !d.ok && !!d.wanted)) &&
      (!reason.value || d.reason.toLowerCase().includes(reason.value.toLowerCase())) &&
      (!module.value || d.module.includes(module.value) || d.nodes.some((n) => n.includes(module.value))) &&
      (folded.checked || !d.folded));
    clear(body);
    if (!rows.length) body.append(h("tr", {}, h("td", { colspan: 8, class: "muted" }, all.length ? "No candidate is like this." : "No candidate was recorded: no rules were applied to this graph, or none found anything to propose.")));
    for (const d of rows.slice(0, shown)) body.append(row(d));
    if (rows.length > shown) body.append(h("tr", {}, h("td", { colspan: 8 }, h("button", { type: "button", onclick: () => { shown += PAGE; update(); } }, `Show ${Math.min(PAGE, rows.length - shown)} more`))));
    const left = program.data.left_out ? `; ${plural(program.data.left_out, "more refusal")} of the same reasons are only counted` : "";
    summary.textContent = `${plural(rows.length, "candidate")} of ${count(all.length)}${left}.`;
  };
  const row = (d: (typeof all)[number]) => {
    const open = () => { clear(detail); detail.append(explained(program, d, d.near === undefined ? null : near[d.near], host)); detail.scrollIntoView({ block: "nearest" }); };
    return h("tr", { class: d.ok ? "accepted" : "refused", tabindex: 0, onclick: open, onkeydown: (e: KeyboardEvent) => { if (e.key === "Enter") open(); } },
      h("td", { class: "number" }, String(d.number)),
      h("td", {}, h("span", { class: "verdict" }, d.ok ? "accepted" : d.wanted ? `${d.matched} of ${d.wanted} matched` : "refused")),
      h("td", {}, h("span", { class: "kind-name" }, d.kind ? host.swatch(d.kind) : null, d.kind || d.rule), d.kind && d.kind !== d.rule ? h("span", { class: "muted" }, " " + d.rule) : null),
      h("td", { class: "nodes" }, d.ok ? d.reason : short(d), d.more ? h("span", { class: "muted" }, ` and ${d.more} alike`) : null),
      h("td", { class: "module" }, d.module || "–"),
      h("td", { class: "figure" }, d.before && d.after ? `${bytes(d.before[0])} → ${bytes(d.after[0])}` : "–"),
      h("td", { class: "figure" }, d.before && d.after ? `${d.before[1]} → ${d.after[1]}` : "–"),
      h("td", { class: "reason" }, d.ok ? saving(d) : d.reason));
  };
  for (const control of [rule, state]) control.addEventListener("change", () => { shown = PAGE; update(); });
  for (const control of [reason, module]) control.addEventListener("input", () => { shown = PAGE; update(); });
  folded.addEventListener("change", update);
  update();
  const head = ["", "Outcome", "Kind", "Operations", "Module", "Bytes, before → after", "Launches", "Why"];
  return h("div", { class: "page decisions" },
    whyApart(program, host),
    h("form", { class: "filters", onsubmit: (e: Event) => e.preventDefault() }, field("Rule", rule), field("Outcome", state), field("Reason", reason), field("Module", module),
      h("label", { class: "check" }, folded, "also what adds nothing (inside regions, less near than another)")),
    summary, detail,
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ...head.map((t) => h("th", { scope: "col" }, t)))), body)));
}

function moduleOf(program: Program, d: Decision): string {
  const item = program.find(d.ok ? d.reason : d.place ?? d.nodes[0] ?? "") ?? (d.nodes.length ? program.find(d.nodes[0]) : null);
  return item?.path() ?? "";
}

function short(d: Decision): string {
  return d.nodes.slice(0, 4).join(", ") + (d.size > 4 ? ` … (${d.size})` : "");
}

function saving(d: Decision): string {
  if (!d.before || !d.after) return "saves an unknown amount";
  const parts: string[] = [];
  if (d.before[0] > d.after[0]) parts.push(bytes(d.before[0] - d.after[0]));
  if (d.before[1] > d.after[1]) parts.push(plural(d.before[1] - d.after[1], "launch", "launches"));
  return parts.length ? "saves " + parts.join(" and ") : "saves nothing by the model of costs";
}

function explained(program: Program, d: Decision, near: Near | null, host: DetailsHost): HTMLElement {
  const title = d.ok ? d.reason : `${d.rule}: ${d.reason}`;
  const names = d.nodes.slice(0, 12).map((n) => nameLink(program, n, host));
  const block = h("div", { class: "card" }, h("h3", {}, title),
    h("p", {}, `Rule ${d.rule}, round ${d.round}. `, d.place ? h("span", {}, "At ", nameLink(program, d.place, host), ". ") : null, "Operations: ", ...names.flatMap((n, i) => (i ? [", ", n] : [n]))));
  if (near) {
    const side = (head: string, rows: [string, string, number][]) => h("div", { class: "side" }, h("h4", {}, head),
      h("ol", {}, ...rows.map(([op, name, mark]) => h("li", { class: ["", "miss", "absent", "absent"][mark] }, h("code", {}, op), name ? h("span", { class: "muted" }, " " + name) : null, mark === 1 || mark === 2 ? h("span", { class: "flag" }, mark === 1 ? "differs" : "not there") : null))));
    block.append(h("div", { class: "sides" }, side(`Pattern ${near.title}`, near.pattern.map(([op, mark]) => [op, "", mark])), side("Graph", near.graph)));
  } else if (!d.ok && d.wanted) block.append(h("p", { class: "muted" }, `${d.matched} of ${d.wanted} operations matched. The rule's pattern is not known here.`));
  return block;
}

export function nameLink(program: Program, name: string, host: DetailsHost): HTMLElement {
  const item = program.find(name);
  if (!item) return h("code", {}, name);
  return h("button", { type: "button", class: "link", onclick: () => host.show(program, item) }, name);
}

function whyApart(program: Program, host: DetailsHost): HTMLElement {
  const first = input("an operation");
  const second = input("another one");
  const result = h("div", { class: "answer", role: "status" });
  const list = h("datalist", { id: "names-" + program.side });
  for (const name of program.names.slice(0, 500)) list.append(h("option", { value: name }));
  first.setAttribute("list", list.id);
  second.setAttribute("list", list.id);
  const ask = () => {
    clear(result);
    const items = [first, second].map((field) => program.find(field.value.trim()));
    if (!first.value || !second.value) return;
    const missing = items.findIndex((i) => !i);
    if (missing >= 0) result.append(h("p", {}, `There is no operation "${[first, second][missing].value}".`));
    else result.append(h("ul", {}, ...answer(program, items[0]!, items[1]!).map((r) => h("li", {}, r))));
  };
  first.addEventListener("input", ask);
  second.addEventListener("input", ask);
  const listed = program.data.apart.slice(0, 30);
  const choices = select("Neighbors that are apart", ["neighbors that are apart …", ...listed.map((p) => `${p.a} and ${p.b}`)]);
  choices.addEventListener("change", () => {
    const pair = listed[choices.selectedIndex - 1];
    if (pair) { first.value = pair.a; second.value = pair.b; ask(); }
  });
  void host;
  return h("div", { class: "card ask" }, h("h3", {}, "Why apart?"),
    h("div", { class: "filters" }, field("Operation", first), field("and", second), listed.length ? field("or choose", choices) : null), list, result);
}

/** The view of costs: bars by kind and by region, before and after. */
export function timeView(program: Program, host: DetailsHost): HTMLElement {
  const measured = new Map(program.data.measured.map((m) => [m.region, m]));
  const modelled = costRows(program);
  const timed = measuredRows(program);
  const total = program.root.template.m;
  const hasTime = measured.size > 0;
  const metrics = hasTime ? ["time", "bytes", "launches"] : ["bytes", "launches", "flop"];
  const chosen = select("Figure", metrics);
  const list = h("div");
  const kinds = h("div");
  let shown = 40;
  const update = () => {
    const metric = chosen.value;
    const rows = metric === "time" ? timed : modelled;
    const value = (r: CostRow, after: boolean): number => metric === "time" ? r.seconds : metric === "bytes" ? (after ? r.totals[4] : r.totals[3]) : metric === "launches" ? (after ? r.totals[6] : r.totals[5]) : r.totals[2];
    const format = (v: number) => metric === "time" ? seconds(v) : metric === "bytes" ? bytes(v) : count(v);
    const twice = metric === "bytes" || metric === "launches";
    const byKind = new Map<string, CostRow & { regions: number }>();
    for (const r of rows) {
      const sum = byKind.get(r.kind);
      if (sum) { r.totals.forEach((v, i) => { sum.totals[i] += v * r.times; }); sum.seconds += r.seconds * r.times; sum.regions += r.times; }
      else byKind.set(r.kind, { ...r, totals: r.totals.map((v) => v * r.times), seconds: r.seconds * r.times, regions: r.times });
    }
    clear(kinds);
    const sums = [...byKind.values()].sort((a, b) => value(b, true) - value(a, true));
    const most = Math.max(...sums.map((r) => Math.max(value(r, false), value(r, true))), 1e-12);
    for (const r of sums) kinds.append(bar(r.kind === "" ? "launched operations in no region" : r.kind, r.kind ? plural(r.regions, "region") : plural(r.regions, "operation"), value(r, false), value(r, true), most, format, twice, r.kind ? host.swatch(r.kind) : null, null));
    clear(list);
    const regions = [...rows].sort((a, b) => value(b, true) - value(a, true));
    const largest = Math.max(...regions.map((r) => Math.max(value(r, false), value(r, true))), 1e-12);
    for (const r of regions.slice(0, shown)) list.append(bar(r.item.name + (r.times > 1 ? ` ×${r.times}` : ""), r.item.path(), value(r, false), value(r, true), largest, format, twice, r.kind ? host.swatch(r.kind) : null, () => host.show(program, r.item)));
    if (!regions.length) { kinds.append(nothing()); list.append(nothing()); }
    if (regions.length > shown) list.append(h("button", { type: "button", onclick: () => { shown += 100; update(); } }, `Show ${Math.min(100, regions.length - shown)} more`));
    source.textContent = metric === "time"
      ? "Measured: " + unique([...measured.values()].map((m) => m.source)).join("; ") + "."
      : "Modelled from shapes and types, not measured: " + (metric === "launches" ? "one launch for each operation or region that is no view." : metric === "bytes" ? "values inside a region are neither stored nor loaded, operands are loaded once." : "floating-point operations by the shapes.");
    legend.style.visibility = twice ? "visible" : "hidden";
  };
  const source = h("p", { class: "muted" });
  const legend = h("div", { class: "bar-legend" }, h("span", { class: "key before" }), h("span", {}, "before fusing"), h("span", { class: "key after" }), h("span", {}, "now"));
  chosen.addEventListener("change", update);
  update();
  const saved = total[3] - total[4];
  const planned = [...program.data.planned].sort((a, b) => b.seconds - a.seconds);
  const longest = Math.max(...planned.map((p) => Math.max(p.seconds, p.runner_up_seconds ?? 0)), 1e-12);
  const decided = h("div", {}, ...planned.map((p) => bar(
    `${p.scope} ${p.label}`, p.choice + (p.runner_up ? `; next best: ${p.runner_up}` : ""), p.runner_up_seconds ?? 0, p.seconds, longest, seconds, p.runner_up_seconds !== null, null, null)));
  return h("div", { class: "page time" },
    h("div", { class: "filters" }, field("Figure", chosen), legend), source,
    h("p", { class: "lead" }, `In all ${bytes(total[3])} before and ${bytes(total[4])} now ${total[3] ? `(${percent(saved, total[3])} less)` : ""}, ${count(total[5])} launches before and ${count(total[6])} now, modelled.`),
    planned.length ? section("Decisions of the plan, measured: the next best above what was chosen", decided) : null,
    h("div", { class: "columns" }, section("By kind", kinds), section("By region, the most expensive first; of equal ones (×) the figures are those of each", list)));
}

const nothing = (): HTMLElement => h("p", { class: "muted" }, "There is nothing to show: no operation is launched.");

export interface CostRow { item: Item; kind: string; totals: number[]; times: number; seconds: number }

/** Regions, and operations in none: each distinct one once, where it first occurs, with the number of its occurrences. */
export function costRows(program: Program): CostRow[] {
  const templates = program.report.templates;
  // Templates refer to earlier ones only, so that in descending order each is complete before it is passed on.
  const counts = new Map<number, number>([[program.root.number, 1]]);
  for (let number = program.root.number; number >= 0; number--) {
    const count = counts.get(number);
    const template = templates[number];
    if (!count || template.t === "region" || !template.c) continue;
    for (const [inner] of template.c) counts.set(inner, (counts.get(inner) ?? 0) + count);
  }
  const rows: CostRow[] = [];
  const seen = new Set<number>();
  const stack = [program.root];
  while (stack.length) {
    const item = stack.pop()!;
    if (seen.has(item.number)) continue;
    seen.add(item.number);
    const { t, m, r } = item.template;
    if (t === "region" || (t === "op" && m[6])) rows.push({ item, kind: r ?? "", totals: [...m], times: counts.get(item.number)!, seconds: 0 });
    else if (!item.leaf) stack.push(...item.children().slice().reverse());
  }
  return rows;
}

/** The regions that were measured, each by itself. */
function measuredRows(program: Program): CostRow[] {
  return program.data.measured.flatMap((m) => {
    const item = program.find(m.region);
    return item ? [{ item, kind: item.template.r ?? "", totals: [...item.template.m], times: 1, seconds: m.seconds }] : [];
  });
}

function bar(
  title: string, small: string, before: number, after: number, most: number, format: (v: number) => string, twice: boolean,
  swatch: HTMLElement | null, action: (() => void) | null,
): HTMLElement {
  const width = (v: number) => { const e = h("span", { class: "fill" }); e.style.width = `${(100 * v) / most}%`; return e; };
  const label = action ? h("button", { type: "button", class: "link", onclick: action }, title) : h("span", {}, title);
  return h("div", { class: "bar-row" }, h("div", { class: "bar-title" }, swatch, label, h("span", { class: "muted" }, " " + small)),
    h("div", { class: "bars" }, twice ? h("div", { class: "before" }, width(before)) : null, h("div", { class: "after" }, width(after))),
    h("div", { class: "bar-figure" }, twice && before !== after ? `${format(before)} → ${format(after)}` : format(after)));
}

export function unique(texts: string[]): string[] {
  return [...new Set(texts)].sort();
}

export function select(label: string, options: string[]): HTMLSelectElement {
  return h("select", { "aria-label": label }, ...options.map((o) => h("option", { value: o }, o)));
}

function input(label: string): HTMLInputElement {
  return h("input", { type: "search", "aria-label": label, placeholder: label, autocomplete: "off", spellcheck: "false" });
}

export function field(label: string, control: HTMLElement): HTMLElement {
  return h("label", { class: "field" }, h("span", {}, label), control);
}
