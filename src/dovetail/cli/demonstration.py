"""`demo`: a Llama of the zoo captured, fused, lowered and measured, with a report to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.fx import GraphModule

from dovetail.cli.benchmark import (
    COLUMNS,
    OPTIONAL,
    RIGHT,
    Benchmark,
    BenchmarkRow,
    chosen_backends,
    noise_text,
)
from dovetail.cli.command import BackendNames
from dovetail.cli.console import Console
from dovetail.cli.entry_point import FAILURE, SUCCESS
from dovetail.cli.model_source import LoadedModel, ModelSource
from dovetail.cli.program_commands import require_folder
from dovetail.fusion.fuse import fuse
from dovetail.fusion.ledger import explain
from dovetail.ir.printer import text
from dovetail.ir.text_tables import amount, counted, percent
from dovetail.lowering.backend_protocol import DEFAULT
from dovetail.outlining.inline import inline
from dovetail.outlining.region import regions
from dovetail.reporting.report import report

_TIMED_SECONDS = 5.0


def demo(
    console: Console,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the report is written.")] = Path("report.html"),
    size: Annotated[str, typer.Option(metavar="SIZE", help="The size of the zoo's Llama: tiny, small or base.")] = "small",
    backend: BackendNames = None,
) -> int:  # fmt: skip
    """Fuse and measure a small Llama.

    It is captured, fused and lowered, checked bit for bit, measured against eager and torch.compile, and shown in a
    report. Exits with 1 if anything differs.
    """
    chosen_backends(backend or list(DEFAULT), torch.device("cpu"))
    output.parent.mkdir(parents=True, exist_ok=True)
    require_folder(output)
    loaded = ModelSource(arg=(f"size={size}",)).load("zoo:llama")
    typed = f"zoo:llama --arg size={size}"
    console.text(f"{loaded}", style="strong")

    with console.step("capturing") as capturing:
        captured = loaded.graph()
    original = text(captured)
    with console.step("fusing") as fusing:
        fused = fuse(captured)
    ledger = explain(fused)
    share = ledger.coverage()

    _heading(console, f"What is fused, what is not, and why: dovetail inspect {typed}")
    console.text(str(ledger))
    asked = _unfused_pair(fused)
    reasons: list[str] = []
    if asked is not None:
        first, second = asked
        _heading(console, f"Why not together? dovetail why {typed} {first} {second}")
        reasons = list(ledger.why_not(first, second))
        console.text("\n".join(f"  - {reason}" for reason in reasons))

    _heading(console, "Nothing else changed")
    verdicts = _verdicts(loaded, captured, fused, original)
    holds = [console.verdict(holds, claim) for claim, holds in verdicts.items()]

    _heading(console, f"Measured against eager and torch.compile: dovetail bench {typed}")
    benchmark = Benchmark(loaded, console)
    rows = benchmark.rows(chosen_backends(backend or list(DEFAULT), benchmark.device))
    noise = benchmark.time(rows, _TIMED_SECONDS)
    failed = [number for number, row in enumerate(rows) if row.failure]
    console.table(COLUMNS, [row.cells() for row in rows], right=RIGHT, bad=failed, optional=OPTIONAL)
    console.text(f"  {noise_text(noise)}", style="faint")

    with console.step("writing the report") as writing:
        report(fused, output, compare=captured)
    bodies = len({region.key for region in regions(fused)})
    saved = f"{counted(ledger.launches_saved, 'launch')} and {amount(ledger.bytes_saved)} of memory traffic a call"
    _heading(console, "What happened, and what it gained")
    console.table(
        ("step", "result", "gain", "time"),
        [
            [
                "capture",
                counted(share.total.operations, "operation"),
                "one graph of ATen operators",
                str(capturing),
            ],
            [
                "fuse",
                f"{counted(share.regions, 'region')}, {counted(bodies, 'distinct body').replace('bodys', 'bodies')}",
                f"saves {saved.replace('launchs', 'launches')}",
                str(fusing),
            ],
            [
                "",
                f"{percent(share.inside.operations, share.total.operations)} of operations in regions",
                "",
                "",
            ],
            *(_measured_cells(row) for row in rows if row.name.startswith("dovetail")),
            ["report", str(output), "every decision, to look at", str(writing)],
        ],
        right=(3,),
    )
    console.text(f"\nreport: {output.resolve()}\nOpen it in a browser.", style="strong")
    console.document(
        {
            **loaded.summary(),
            "operations": share.total.operations,
            "regions": share.regions,
            "bodies": bodies,
            "saved": {"bytes": ledger.bytes_saved, "launches": ledger.launches_saved},
            "why": reasons,
            "verdicts": verdicts,
            "programs": [row.document() for row in rows],
            "noise": noise,
            "report": str(output.resolve()),
        }
    )
    return SUCCESS if all(holds) and not failed else FAILURE


def _heading(console: Console, heading: str) -> None:
    console.text(f"\n{heading}", style="strong")


def _measured_cells(row: BenchmarkRow) -> list[str]:
    first = "" if row.first_seconds is None else row.cells()[1]
    if row.failure or row.seconds is None or row.compared is None:
        return [f"lower, {row.name}", row.failure, "", first]
    gain = {
        "tie": "as fast as eager, within the noise of this machine",
        "undecided": "undecided: this machine is too noisy now",
    }.get(row.compared.verdict, f"{1 / row.compared.ratio:.2f} times as fast as eager")
    return [f"lower, {row.name.removeprefix('dovetail: ')}", f"regions: {row.lowered}", gain, first]


def _unfused_pair(fused: GraphModule) -> tuple[str, str] | None:
    """Return an operation of a region and one of the next region that reads its result."""
    every = regions(fused)
    by_output = {output: region for region in every for output in region.outputs}
    for region in every:
        for value in region.inputs:
            earlier = by_output.get(value)
            if earlier is not None and earlier.nodes and region.nodes:
                return earlier.nodes[-1], region.nodes[0]
    return None


def _verdicts(
    loaded: LoadedModel, captured: GraphModule, fused: GraphModule, original: str
) -> dict[str, bool]:
    args, kwargs = loaded.args, dict(loaded.kwargs)
    with torch.no_grad():
        expected: Any = loaded.model(*args, **kwargs)
        once, outlined = captured(*args, **kwargs), fused(*args, **kwargs)
    return {
        "the captured graph computes what the model does, bit for bit": torch.equal(once, expected),
        "the fused graph computes the same, bit for bit": torch.equal(outlined, expected),
        "inlining gives back the captured graph": text(inline(fused)) == original,
        "the graph that was fused is as it was": text(captured) == original,
    }
