// Two programs side by side: what is opened or moved in one is in the other, and the differences as a list.

import { Comparison, Item, Program } from "./model";
import { Pane, PaneHost } from "./program";
import { bytes, h, plural } from "./dom";

export class Compare {
  readonly element: HTMLElement;
  private panes: [Pane, Pane];
  private busy = false;

  constructor(programs: [Program, Program], comparison: Comparison, host: Omit<PaneHost, "toggled" | "panned" | "zoomed" | "marked">) {
    const changed = programs.map((program, side) => {
      const ids = new Set<string>();
      for (const d of comparison.differences) {
        const slot = side ? d.right : d.left;
        const item = slot === null ? null : program.at(slot);
        if (item) ids.add(item.id);
      }
      return ids;
    });
    const paneHost = (side: number): PaneHost => ({
      ...host,
      marked: (item) => (changed[side].has(item.id) ? "differs" : null),
      select: (pane, item) => {
        host.select(pane, item);
        if (item) this.follow(pane, item, null);
      },
      toggled: (pane, item) => this.follow(pane, item, pane.isOpen(item)),
      panned: (pane, dx, dy) => this.together(() => this.other(pane).pan(dx, dy)),
      zoomed: (pane, factor, x, y) => this.together(() => this.other(pane).zoom(factor, x, y, false)),
    });
    this.panes = [
      new Pane(programs[0], paneHost(0), "the first program"), new Pane(programs[1], paneHost(1), "the second program"),
    ];
    this.panes[0].openLike(this.panes[1]);
    this.panes[1].openLike(this.panes[0]);
    const go = (d: { left: number | null; right: number | null }) => {
      const targets = [d.left, d.right].map((slot, i) => (slot === null ? null : programs[i].at(slot)));
      const first = targets[1] ? 1 : 0;
      const item = targets[first];
      if (!item) return;
      this.together(() => this.panes[first].reveal(item));
      const counterpart = targets[1 - first] ?? programs[1 - first].counterpart(item);
      if (counterpart) this.panes[1 - first].align(counterpart, this.panes[first].top(item), null);
    };
    const rows = comparison.differences.map((d) =>
      h("li", { class: "difference " + d.sort }, d.left === null && d.right === null ? d.text : h("button", { type: "button", class: "link", onclick: () => go(d) }, d.text), d.times > 1 ? h("span", { class: "muted" }, ` ×${d.times}`) : null));
    const plans = comparison.plans.map((text) => h("li", { class: "difference plan" }, text));
    const title = (text: string, program: Program) => h("div", { class: "pane-title" }, h("strong", {}, text), h("span", { class: "muted" }, ` ${plural(program.root.template.m[0], "operation")}, ${plural(regionCount(program), "region")}, ${bytes(program.root.template.m[4])}, ${plural(program.root.template.m[6], "launch", "launches")}`));
    const empty = !rows.length && !plans.length;
    this.element = h("div", { class: "compare" },
      h("div", { class: "differences", "aria-label": "differences" },
        h("h3", {}, empty ? "No differences" : plural(rows.length + plans.length, "difference")),
        plans.length ? h("h4", {}, "Decisions of the plans") : null, plans.length ? h("ul", {}, ...plans) : null,
        rows.length ? h("h4", {}, "Programs") : null, h("ul", {}, ...rows),
        h("p", { class: "muted" }, `${plural(comparison.same, "operation")} in parts that are equal.`)),
      h("div", { class: "side-pane" }, title(comparison.left, programs[0]), this.panes[0].element),
      h("div", { class: "side-pane" }, title(comparison.right, programs[1]), this.panes[1].element));
  }

  private other(pane: Pane): Pane {
    return this.panes[pane === this.panes[0] ? 1 : 0];
  }

  /** Brings what corresponds to an item to the same height in the other program. */
  private follow(pane: Pane, item: Item, open: boolean | null): void {
    this.together(() => {
      const other = this.other(pane);
      const counterpart = other.program.counterpart(item);
      if (counterpart && counterpart.parent) other.align(counterpart, pane.top(item), open);
    });
  }

  /** Runs what changes both panes, without the second change calling back. */
  private together(action: () => void): void {
    if (this.busy) return;
    this.busy = true;
    try { action(); } finally { this.busy = false; }
  }

  print(on: boolean): void {
    for (const pane of this.panes) pane.print(on);
  }

  shown(): void {
    for (const pane of this.panes) { pane.draw(); pane.fit(); }
  }
}

export function regionCount(program: Program): number {
  return Object.values(program.root.template.k ?? {}).reduce((a, b) => a + b, 0);
}
