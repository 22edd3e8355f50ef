"""The file of results: one section for each benchmark, replaced by its next run."""

from __future__ import annotations

import re
from pathlib import Path


def write_section(path: Path, title: str, text: str) -> None:
    """Replace the section under a top heading, or add it at the end; the others stay as they are."""
    old = path.read_text() if path.exists() else ""
    sections = [part for part in re.split(r"(?m)^(?=# )", old) if part.strip()]
    section = f"# {title}\n\n{text.strip()}\n"
    kept = [section if part.startswith(f"# {title}\n") else f"{part.strip()}\n" for part in sections]
    if section not in kept:
        kept.append(section)
    path.write_text("\n".join(kept))
