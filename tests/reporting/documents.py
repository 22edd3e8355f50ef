"""What tests read out of a report that was written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def document_of(path: Path) -> dict[str, Any]:
    """The document in a report, found as a browser does: up to the first end of the element."""
    match = _DATA.search(path.read_text(encoding="utf-8"))
    assert match is not None
    return json.loads(match[1])


def item_at(document: dict[str, Any], slot: int, side: str = "graphs") -> str:
    return document[side][0]["names"].split("\n")[slot]
