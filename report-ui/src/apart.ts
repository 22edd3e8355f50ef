// Why two operations are not in one region: the reasons that were computed when the report was written, for pairs of
// neighbors, and for any other pair what the recorded decisions have.

import { Item, Program } from "./model";

const known = new WeakMap<Program, Map<string, string[]>>();

function pairs(program: Program): Map<string, string[]> {
  let map = known.get(program);
  if (!map) {
    map = new Map();
    for (const { a, b, reasons } of program.data.apart) {
      map.set(a + "|" + b, reasons);
      map.set(b + "|" + a, reasons);
    }
    known.set(program, map);
  }
  return map;
}

const byTemplate = new WeakMap<Program, Map<string, string[]>>();

/** The reasons by what the two compute, for places that are equal to one that was examined. */
function alike(program: Program): Map<string, string[]> {
  let map = byTemplate.get(program);
  if (!map) {
    map = new Map();
    for (const { a, b, reasons } of program.data.apart) {
      const items = [program.find(a), program.find(b)];
      if (!items[0] || !items[1]) continue;
      const texts = [`as for ${a} and ${b}: ${reasons[0]}`, ...reasons.slice(1)];
      map.set(items[0].number + "|" + items[1].number, texts);
      map.set(items[1].number + "|" + items[0].number, texts);
    }
    byTemplate.set(program, map);
  }
  return map;
}

/** The same place in the first of equal layers, which is the one that was examined. */
function canonical(item: Item): string {
  let offset = item.offset;
  for (const around of item.ancestors().reverse())
    if (around.template.t === "fold" && around.parent?.template.t !== "fold")
      offset = around.offset + ((offset - around.offset) % around.template.z!);
  return item.program.names[offset];
}

export function reasonsApart(a: Item, b: Item): string[] {
  const map = pairs(a.program);
  const reasons = map.get(a.name + "|" + b.name) ?? map.get(canonical(a) + "|" + canonical(b));
  return reasons ?? alike(a.program).get(a.number + "|" + b.number) ?? [];
}

export function regionAround(item: Item): Item | null {
  for (let at = item.parent; at; at = at.parent) if (at.template.t === "region") return at;
  return null;
}

/** Everything that the report has on two operations, by name. */
export function answer(program: Program, a: Item, b: Item): string[] {
  if (a === b) return [`${a.name} is one operation.`];
  const homes = [regionAround(a), regionAround(b)];
  if (homes[0] && homes[0] === homes[1]) return [`They are together already, in region ${homes[0].name} (${homes[0].template.r}).`];
  const reasons = reasonsApart(a, b);
  if (reasons.length) return reasons;
  const texts: string[] = [];
  [a, b].forEach((item, i) => {
    const home = homes[i];
    texts.push(home ? `${item.name} is in region ${home.name} (${home.template.r}).` : `${item.name} is in no region.`);
  });
  const names = [new Set([a.name, homes[0]?.name ?? a.name]), new Set([b.name, homes[1]?.name ?? b.name])];
  for (const decision of program.data.decisions) {
    if (decision.ok) continue;
    const touched = names.map((own) => [...decision.nodes, decision.place ?? ""].some((n) => own.has(n)));
    if (touched[0] && touched[1]) texts.push(`Rule ${decision.rule} declined both: ${decision.reason}.`);
  }
  if (texts.length === 2) {
    for (const decision of program.data.decisions) {
      if (decision.ok || texts.length > 6) continue;
      const hit = names.findIndex((own) => [...decision.nodes, decision.place ?? ""].some((n) => own.has(n)));
      if (hit >= 0) texts.push(`Rule ${decision.rule} declined ${[a, b][hit].name}: ${decision.reason}.`);
    }
  }
  return texts;
}
