"""What tests of pages look for: labels that overlap or leave their boxes, and how many clicks an answer takes."""

from __future__ import annotations

from typing import Any

# Labels in a drawing: every two of one pane apart, each inside its box and beside the button that opens it.
_LABELS = """() => {
  const problems = [];
  const inside = (a, b) => a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
  const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
  for (const pane of document.querySelectorAll(".pane")) {
    if (!pane.offsetParent) continue;
    const labels = [...pane.querySelectorAll("text.label")].map((e) => [e, e.getBoundingClientRect()]);
    labels.forEach(([e, r], i) => {
      const frame = e.parentNode.querySelector(":scope > .frame, :scope > rect").getBoundingClientRect();
      if (!inside(r, frame)) problems.push("outside its box: " + e.textContent);
      const toggle = e.parentNode.querySelector(":scope > .toggle");
      if (toggle && meet(r, toggle.getBoundingClientRect())) problems.push("under its button: " + e.textContent);
      for (let j = 0; j < i; j++) if (meet(r, labels[j][1])) problems.push(e.textContent + " and " + labels[j][0].textContent);
    });
    const boxes = [...pane.querySelectorAll(".box")].filter((b) => b.querySelector(":scope > .frame"));
    for (const box of boxes) {
      const own = box.querySelector(":scope > .frame").getBoundingClientRect();
      for (const other of box.parentNode.children) {
        if (other === box || !other.matches(".box")) continue;
        if (meet(own, other.querySelector(":scope > .frame").getBoundingClientRect())) problems.push("boxes meet: " + box.getAttribute("aria-label"));
      }
    }
  }
  return problems;
}"""

# Text outside drawings: no two pieces overlap, and none is cut off by what it is in.
_TEXTS = """() => {
  const problems = [];
  const pieces = [];
  const walker = document.createTreeWalker(document.getElementById("report"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    const parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest("svg, .zoom, pre, datalist, select, dialog, .results") || !parent.checkVisibility()) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const clip = parent.closest(".view, .panel, .sidebar, .differences, header, footer").getBoundingClientRect();
    for (const r of range.getClientRects())
      if (r.top >= clip.top && r.bottom <= clip.bottom && r.width > 1) pieces.push([node.textContent, r]);
  }
  pieces.forEach(([text, a], i) => {
    if (a.right > innerWidth + 1) problems.push("beyond the window: " + text);
    for (let j = 0; j < i; j++) {
      const b = pieces[j][1];
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
        problems.push(text + " and " + pieces[j][0]);
    }
  });
  if (document.documentElement.scrollWidth > innerWidth) problems.push("the page scrolls sideways");
  return problems;
}"""


def overlaps(page: Any) -> list[str]:
    """Pairs of labels or of texts that overlap, and labels that leave their boxes, in what is shown now."""
    return [*page.evaluate(_LABELS), *page.evaluate(_TEXTS)][:10]


class Reader:
    """A person in front of a page: every click and every search is counted."""

    def __init__(self, page: Any) -> None:
        self.page, self.clicks = page, 0

    def click(self, selector: str, text: str | None = None) -> None:
        self.clicks += 1
        matches = self.page.locator(selector)
        (matches.filter(has_text=text) if text is not None else matches).first.click()

    def search(self, text: str) -> None:
        """Type into the search field and take the first result."""
        self.clicks += 1
        self.page.keyboard.press("/")
        self.page.keyboard.type(text)
        self.page.keyboard.press("Enter")

    def reads(self, selector: str) -> str:
        return " ".join(self.page.locator(selector).all_inner_texts())


def box(page: Any, name: str) -> Any:
    """The box with a title, in the first drawing."""
    return page.locator(f'.box[aria-label*=" {name} "]').first


class ProcessorClock:
    """What a page takes of a processor, in seconds: on a busy machine the same, unlike the time that passes."""

    def __init__(self, page: Any) -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds(self) -> float:
        """Seconds that the page's thread has run since the page began to load."""
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        [seconds] = [metric["value"] for metric in metrics if metric["name"] == "ThreadTime"]
        return seconds
