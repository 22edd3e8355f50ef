"""`report`: a page that shows what was fused, what was not and why, and what it gains.

The page is one file with the document as JSON, a script and styles. Nothing in the document can end its element or run:
`<` is written as an escape in JSON, and the script makes text nodes of what it reads. The content security policy allows
the one script and the one style sheet by their hashes, and nothing else: no request leaves the file.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import os
import time
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, checked_call, user_stacklevel
from dovetail.formats.atomic_write import atomic_replace, resolve_target
from dovetail.ir.graph_module import GraphOwner, graphs_of
from dovetail.ir.module_paths import frames_of
from dovetail.outlining.bodies import with_module_prefix
from dovetail.reporting.document import ReportSide, make_document
from dovetail.reporting.measured_times import Ranges, has_plan_times, read_profile
from dovetail.runtime.compiled_module import CompiledModule
from dovetail.scheduling.schedule import Schedule
from dovetail.tuning.plan import Plan

_LOG = logging.getLogger(__name__)


@checked_call()
def report(
    x: GraphModule | GraphOwner | Schedule,
    path: str | os.PathLike[str],
    *,
    compare: GraphModule | GraphOwner | Schedule | None = None,
    plan: Plan | None = None,
    profile: Any = None,
) -> Path:
    """Write a page about a graph, a compiled model or a schedule to one HTML file, and return its path.

    The page has the program with its regions, the decisions with their reasons, and what regions cost; with `compare`,
    also a second program beside the first, and what differs. It needs no server and no network. Costs are modelled from
    shapes unless there are measured times: of the plan that the model was compiled with or that is given, or of a
    `profile`, which is one of torch.profiler or the path of a trace that it exported. A `plan` is not applied; if it has
    measured no region of the graph, that is a warning. The file is replaced in one step.
    """
    if not isinstance(path, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a str nor a Path.")
    if plan is not None and not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"plan is a {type(plan).__name__}; give a dovetail.Plan.")
    started = time.perf_counter()
    side = _side(
        x,
        "this program" if compare is None else "first",
        plan,
        None if profile is None else read_profile(profile),
    )
    other = None if compare is None else _side(compare, "second", None, None)
    if plan is not None and not has_plan_times(side.graphs, plan):
        warnings.warn(
            "none of the plan's measurements is of a region of this graph: compile the model with the plan, and report that.",
            stacklevel=user_stacklevel(),
        )
    target = resolve_target(path)
    page = render_page(make_document(program_title(x), side, other, version("dovetail")))
    with atomic_replace(target) as file:
        file.write_text(page, encoding="utf-8")
    _LOG.info("report: wrote %s, %.1f MB, in %.1f s", target, len(page) / 1e6, time.perf_counter() - started)
    return Path(path)


def _side(x: object, label: str, plan: Plan | None, profile: Ranges | None) -> ReportSide:
    if isinstance(x, Schedule):
        parts = x.part_graphs
        if not parts:
            raise InvalidArgument("no part of the schedule is traced yet: `find`, `fuse` or `verify` first.")
        graphs = [with_module_prefix(gm, root) if root else gm for root, gm in parts]
        names = [root or "the model" for root, _ in parts]
        return ReportSide(label, graphs, names, plan=plan, profile=profile)
    graphs = graphs_of(x)
    names = tuple(f"graph {number}" for number in range(1, len(graphs) + 1)) if len(graphs) > 1 else (label,)
    if isinstance(x, CompiledModule):
        own = x.plan
        diagnostics = tuple(map(str, x.diagnostics))
        own_plan = own if isinstance(own, Plan) else None
        return ReportSide(label, graphs, names, diagnostics, plan or own_plan, profile)
    return ReportSide(label, graphs, names, plan=plan, profile=profile)


def program_title(x: object) -> str:
    """Return the name of the model, as far as it is known."""
    if isinstance(x, Schedule):
        return "Schedule"
    name = x.model_name if isinstance(x, CompiledModule) else type(x).__name__
    if isinstance(x, GraphModule):
        frames = next((frames_of(node.meta) for node in x.graph.nodes if frames_of(node.meta)), [])
        name = frames[0].class_name if frames and not frames[0].path else name
    return name


def render_page(document: Mapping[str, Any]) -> str:
    """Return the page that shows a document."""
    script, styles = asset("report.js"), asset("report.css")
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # Within a script element only `<` could begin anything but text; the two separators end lines in JavaScript alone.
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    sources = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(styles)}'"
    policy = f"{sources}; base-uri 'none'; form-action 'none'"
    title = html.escape(str(document["title"]))
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{styles}</style>\n</head>\n<body>\n"
        '<noscript>This report is drawn by a script.</noscript>\n<div id="report"></div>\n'
        f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>\n</body>\n</html>\n'
    )


@cache
def asset(name: str) -> str:
    """Return a file of the page that `make report-assets` wrote."""
    text = resources.files(__package__ or "").joinpath("assets", name).read_text(encoding="utf-8")
    return text.strip()


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
