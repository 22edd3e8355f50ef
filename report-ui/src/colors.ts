// A color for each kind: a hash of its name picks a place in a palette that people with any color vision can tell apart
// (after P. Tol, "Color schemes", 2021), and kinds of one report that meet at a place take the next free one.

export const PALETTE = 10;

function hash(text: string): number {
  let value = 2166136261;
  for (let i = 0; i < text.length; i++) value = Math.imul(value ^ text.charCodeAt(i), 16777619);
  return value >>> 0;
}

export function assign(names: string[]): Map<string, number> {
  const taken = new Set<number>();
  const places = new Map<string, number>();
  for (const name of [...names].sort()) {
    let place = hash(name) % PALETTE;
    for (let i = 0; i < PALETTE && taken.has(place); i++) place = (place + 1) % PALETTE;
    taken.add(place);
    places.set(name, place);
  }
  return places;
}
