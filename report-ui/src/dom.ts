// Elements are made of text nodes only: whatever a model, a rule or a file is called, it is shown and never parsed.

export type Child = Node | string | null | undefined | false;
type Attributes = Record<string, string | number | boolean | ((event: any) => void) | null | undefined>;

const SVG = "http://www.w3.org/2000/svg";

function fill(element: Element, attributes: Attributes, children: Child[]): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(typeof child === "string" ? document.createTextNode(child) : child);
  }
}

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K, attributes: Attributes = {}, ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  fill(element, attributes, children);
  return element;
}

export function s(tag: string, attributes: Attributes = {}, ...children: Child[]): SVGElement {
  const element = document.createElementNS(SVG, tag) as SVGElement;
  fill(element, attributes, children);
  return element;
}

export function clear(element: Element): void {
  element.replaceChildren();
}

const canvas = document.createElement("canvas").getContext("2d");
const widths = new Map<string, number>();

/** The width of a text in pixels, in the font that the stylesheet gives to boxes. */
export function textWidth(text: string, font: string): number {
  const key = font + text;
  let width = widths.get(key);
  if (width === undefined) {
    if (canvas) {
      canvas.font = font;
      width = canvas.measureText(text).width;
    } else width = text.length * 7;
    if (widths.size > 50000) widths.clear();
    widths.set(key, width);
  }
  return width;
}

/** The beginning of a text that fits into a width, with an ellipsis where it is cut. */
export function fitted(text: string, width: number, font: string): string {
  if (textWidth(text, font) <= width) return text;
  let low = 0;
  let high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (textWidth(text.slice(0, middle) + "…", font) <= width) low = middle;
    else high = middle - 1;
  }
  return text.slice(0, low) + "…";
}

export function bytes(count: number): string {
  const sign = count < 0 ? "−" : "";
  let value = Math.abs(count);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 1024 || unit === "GiB") return sign + (unit === "B" ? value : digits(value)) + " " + unit;
    value /= 1024;
  }
  return "";
}

export function count(value: number): string {
  for (const [unit, factor] of [["T", 1e12], ["G", 1e9], ["M", 1e6]] as const)
    if (Math.abs(value) >= factor) return digits(value / factor) + " " + unit;
  return value.toLocaleString("en-US");
}

export function seconds(value: number): string {
  for (const [unit, factor] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]] as const)
    if (value >= factor) return digits(value / factor) + " " + unit;
  return digits(value * 1e9) + " ns";
}

export function percent(part: number, whole: number): string {
  // What is neither nothing nor all is neither 0 nor 100, as on the ledger's page.
  if (!whole) return "–";
  const share = (100 * part) / whole;
  return part > 0 && share < 1 ? "<1 %" : (part < whole ? Math.min(99, Math.round(share)) : 100) + " %";
}

function digits(value: number): string {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function plural(n: number, one: string, many = one + "s"): string {
  return n.toLocaleString("en-US") + " " + (n === 1 ? one : many);
}
