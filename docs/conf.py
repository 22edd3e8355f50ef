"""How Sphinx builds the site: `make docs` writes it to build/docs, and every warning is an error."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import dovetail

ROOT = Path(__file__).parent.parent

project = "dovetail"
author = "the dovetail authors"
copyright = "the dovetail authors; Apache-2.0"
version = release = dovetail.__version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["images"]
myst_heading_anchors = 3
# Links to files outside of docs (examples, pyproject.toml) are downloads.
myst_enable_extensions = ["attrs_inline", "colon_fence"]

# Docstrings are written with single backticks for code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = False
python_maximum_signature_line_length = 90
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "dovetail"
html_static_path = ["_static"]
html_css_files = ["site.css"]
toc_object_entries = False
# A page opened from a file may not read others, which summaries of search results are made from.
html_show_search_summary = False
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
html_theme_options: dict[str, Any] = {
    # The page works without a network: fonts are those of the reader's system.
    "light_css_variables": {
        "font-stack": "system-ui, sans-serif",
        "font-stack--monospace": "ui-monospace, monospace",
    },
    "navigation_with_keys": True,
}

# Documents outside of docs that are pages of the site: the page is a link to the document, and is built from its text.
PAGES = {
    "project/changelog": "CHANGELOG.md",
    "project/contributing": "CONTRIBUTING.md",
    "project/benchmarks": "benchmarks/RESULTS.md",
}
SITE = {**{path: page for page, path in PAGES.items()}, "README.md": "index"}
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")


def read_page(app: Any, page: str, source: list[str]) -> None:
    """Give a page the text of its document; links that work in the repository lead to pages of the site."""
    document = PAGES.get(page)
    folder = (ROOT / document if document else Path(__file__).parent / page).parent
    text = (ROOT / document).read_text() if document else source[0]
    if page == "project/benchmarks":
        # A page has one title.
        text = "# Benchmarks\n\n" + re.sub(r"^(#+ )", r"#\1", text, flags=re.MULTILINE)

    def in_site(link: re.Match[str]) -> str:
        path = os.path.relpath(folder / link[1], ROOT)
        target = SITE.get(path, path.removeprefix("docs/").removesuffix(".md"))
        if path.endswith(".md"):
            return os.path.relpath(target, Path(page).parent) + ".md"
        return os.path.relpath(ROOT / path, Path(__file__).parent / Path(page).parent)

    # Code is left alone.
    parts = re.split(r"(^```.*?^```$|`[^`\n]+`(?!\]))", text, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [LINK.sub(in_site, part) for part in parts[::2]]
    source[0] = "".join(parts)


def escape_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Outside of backticks, asterisks and bars of a docstring are plain text."""
    parts = re.split(r"(`[^`]*`)", "\n".join(lines))
    parts[::2] = [re.sub(r"([*|\\]|(?<=\w)_(?!\w))", r"\\\1", part) for part in parts[::2]]
    lines[:] = "".join(parts).split("\n")


def setup(app: Any) -> None:
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", escape_docstring)
