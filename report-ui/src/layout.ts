// Coordinates of a level. Ranks and orders were computed when the report was written; what is left is a position for each
// box within its rank. Each sweep places a rank as close to the means of its neighbors as the widths allow: least squares
// under an order, solved by pooling adjacent violators in linear time.

export interface Size { width: number; height: number }
export interface Placed { x: number; y: number; width: number; height: number }
export interface EdgePath { from: number; to: number; points: [number, number][] }
export interface Laid { boxes: Placed[]; edges: EdgePath[]; width: number; height: number }

const GAP_X = 22;
const GAP_Y = 30;
const DUMMY: Size = { width: 6, height: 0 };

export function layOut(
  ranks: number[][], bends: [number, number, number[]][], edges: [number, number][], sizes: Size[],
): Laid {
  const sizeOf = (v: number): Size => sizes[v] ?? DUMMY;
  const total = 1 + Math.max(-1, ...ranks.map((r) => Math.max(-1, ...r)));
  const chain = new Map(bends.map(([a, b, dummies]) => [a + ">" + b, dummies]));
  const up: number[][] = Array.from({ length: total }, () => []);
  const down: number[][] = Array.from({ length: total }, () => []);
  const rankOf = new Array<number>(total).fill(0);
  ranks.forEach((rank, r) => rank.forEach((v) => { rankOf[v] = r; }));
  for (const [a, b] of edges) {
    const path = [a, ...(chain.get(a + ">" + b) ?? []), b];
    for (let i = 1; i < path.length; i++)
      if (rankOf[path[i]] === rankOf[path[i - 1]] + 1) {
        down[path[i - 1]].push(path[i]);
        up[path[i]].push(path[i - 1]);
      }
  }
  const x = new Array<number>(total).fill(0); // centers
  for (const rank of ranks) {
    let at = 0;
    for (const v of rank) {
      x[v] = at + sizeOf(v).width / 2;
      at += sizeOf(v).width + GAP_X;
    }
    const shift = (at - GAP_X) / 2;
    for (const v of rank) x[v] -= shift;
  }
  for (let sweep = 0; sweep < 10; sweep++) {
    const downwards = sweep % 2 === 0;
    for (let i = 0; i < ranks.length; i++) {
      const rank = ranks[downwards ? i : ranks.length - 1 - i];
      const around = downwards ? up : down;
      settle(rank, rank.map((v) => {
        const near = around[v].length ? around[v] : sweep > 5 ? (downwards ? down : up)[v] : [];
        return near.length ? near.reduce((sum, u) => sum + x[u], 0) / near.length : x[v];
      }), x, sizeOf, sizes.length);
    }
  }
  const top: number[] = [];
  const heights = ranks.map((rank) => Math.max(0, ...rank.map((v) => sizeOf(v).height)));
  let y = 0;
  heights.forEach((height, r) => { top[r] = y; y += height + GAP_Y; });
  let left = Infinity;
  let right = -Infinity;
  for (const rank of ranks)
    for (const v of rank) {
      left = Math.min(left, x[v] - sizeOf(v).width / 2);
      right = Math.max(right, x[v] + sizeOf(v).width / 2);
    }
  if (left === Infinity) left = right = 0;
  const boxes = sizes.map((size, v) => ({
    x: x[v] - left - size.width / 2,
    y: top[rankOf[v]] + (heights[rankOf[v]] - size.height) / 2,
    width: size.width, height: size.height,
  }));
  const paths = edges.map(([from, to]) => {
    const points: [number, number][] = [];
    const start = boxes[from];
    points.push([x[from] - left, start.y + start.height]);
    const low = top[rankOf[from]] + heights[rankOf[from]];
    if (low > start.y + start.height + 1) points.push([x[from] - left, low]);
    for (const dummy of chain.get(from + ">" + to) ?? []) {
      const r = rankOf[dummy];
      points.push([x[dummy] - left, top[r]], [x[dummy] - left, top[r] + heights[r]]);
    }
    const end = boxes[to];
    if (end.y > top[rankOf[to]] + 1) points.push([x[to] - left, top[rankOf[to]]]);
    points.push([x[to] - left, end.y]);
    return { from, to, points };
  });
  return { boxes, edges: paths, width: right - left, height: Math.max(0, y - GAP_Y) };
}

/** Moves the centers of one rank to the nearest places to `wanted` that keep its order and its gaps. */
function settle(rank: number[], wanted: number[], x: number[], sizeOf: (v: number) => Size, boxes: number): void {
  const offset: number[] = [];
  let at = 0;
  rank.forEach((v, i) => {
    if (i) at += (sizeOf(rank[i - 1]).width + sizeOf(v).width) / 2 + GAP_X;
    offset.push(at);
  });
  const blocks: { sum: number; weight: number; count: number }[] = [];
  rank.forEach((v, i) => {
    const weight = v >= boxes ? 4 : 1; // bends are kept straight
    let block = { sum: (wanted[i] - offset[i]) * weight, weight, count: 1 };
    while (blocks.length && blocks[blocks.length - 1].sum / blocks[blocks.length - 1].weight > block.sum / block.weight) {
      const last = blocks.pop()!;
      block = { sum: last.sum + block.sum, weight: last.weight + block.weight, count: last.count + block.count };
    }
    blocks.push(block);
  });
  let i = 0;
  for (const block of blocks)
    for (let n = 0; n < block.count; n++, i++) x[rank[i]] = block.sum / block.weight + offset[i];
}

/** A smooth line through points, vertical at each. */
export function curve(points: [number, number][]): string {
  let path = `M${round(points[0][0])} ${round(points[0][1])}`;
  for (let i = 1; i < points.length; i++) {
    const [ax, ay] = points[i - 1];
    const [bx, by] = points[i];
    if (Math.abs(ax - bx) < 0.5) path += `L${round(bx)} ${round(by)}`;
    else {
      const middle = (ay + by) / 2;
      path += `C${round(ax)} ${round(middle)} ${round(bx)} ${round(middle)} ${round(bx)} ${round(by)}`;
    }
  }
  return path;
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}
