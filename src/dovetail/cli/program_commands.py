"""Commands about one program or two: inspect, why, fuse, report, convert, diff."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.fx import GraphModule

from dovetail.cli.command import Model, RuleNames
from dovetail.cli.console import Console
from dovetail.cli.entry_point import FAILURE, SUCCESS
from dovetail.cli.model_source import LoadedModel, ModelSource
from dovetail.cli.rule_names import named_rules
from dovetail.errors import InvalidArgument, PlanMismatch
from dovetail.formats.archive.save import save
from dovetail.formats.model_explorer import to_model_explorer
from dovetail.formats.onnx.to_onnx import to_onnx
from dovetail.formats.stablehlo import to_stablehlo
from dovetail.fusion.ledger import Ledger, explain
from dovetail.ir.printer import diff
from dovetail.ir.text_tables import amount, counted
from dovetail.outlining.region import regions
from dovetail.reporting.report import report
from dovetail.runtime.compile import compile
from dovetail.runtime.compiled_module import CompiledModule
from dovetail.tuning.apply_plan import PlanApplication, environment_of
from dovetail.tuning.check_plan import capture_for_plan
from dovetail.tuning.plan import Plan


def _stablehlo(gm: GraphModule, path: Path) -> None:
    to_stablehlo(gm, path=path)


_WRITERS: dict[str, tuple[str, Callable[[GraphModule, Path], object]]] = {
    ".pt2": ("an archive of torch.export with regions", save),
    ".onnx": ("ONNX, regions as local functions", to_onnx),
    ".mlir": ("StableHLO text, regions as composites", _stablehlo),
    ".stablehlo": ("StableHLO text, regions as composites", _stablehlo),
    ".mlirbc": ("portable StableHLO bytecode", _stablehlo),
    ".json": ("Google's Model Explorer", to_model_explorer),
}
"""What `convert` writes, by the suffix of the file."""


def load_model(console: Console, source: ModelSource, name: str) -> LoadedModel:
    """Return the model of a name, with a step shown while it is made."""
    with console.step(f"loading {name}"):
        return source.load(name)


def _fused(
    console: Console, source: ModelSource, name: str, rules: list[str] | None, **options: Any
) -> tuple[LoadedModel, GraphModule]:
    chosen = named_rules(rules)
    loaded = load_model(console, source, name)
    with console.step(f"capturing and fusing {name}"):
        return loaded, loaded.fused_graph(chosen, **options)


def _ledger_document(loaded: LoadedModel, gm: GraphModule, ledger: Ledger) -> dict[str, Any]:
    share = ledger.coverage()
    return {
        **loaded.summary(),
        "operations": share.total.operations,
        "coverage": {
            "regions": share.regions,
            "operations": share.inside.operations,
            "bytes": _ratio(share.inside.bytes, share.total.bytes),
            "flops": _ratio(share.inside.flops, share.total.flops),
        },
        "saved": {"bytes": ledger.bytes_saved, "launches": ledger.launches_saved},
        "regions": [
            {"name": r.name, "kind": r.kind, "key": r.key, "operations": list(r.nodes)} for r in regions(gm)
        ],
        "outside": [
            {"operation": o.name, "module": o.module, "bytes": o.bytes, "flops": o.flops, "reason": o.reason}
            for o in ledger.outside()
        ],
        "ledger": json.loads(ledger.to_json()),
    }


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def inspect_model(console: Console, source: ModelSource, model: Model, rules: RuleNames = None) -> None:
    """Show what is fused, what is not, and why.

    It is the first page of the ledger, which docs/reading-the-ledger.md explains. A file that is fused already is shown
    as it is.
    """
    loaded, gm = _fused(console, source, model, rules)
    ledger = explain(gm)
    console.text(f"{loaded}\n", style="strong")
    console.text(str(ledger))
    console.document(_ledger_document(loaded, gm, ledger) if console.as_json else None)


def why(
    console: Console,
    source: ModelSource,
    model: Model,
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="A", help="Operation, module path, or source line as in model.py:42.", show_default=False
        ),
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="B", help="The same; both in one region?", show_default=False)
    ] = None,
    rule: Annotated[str | None, typer.Option(metavar="NAME", help="Ask how far a rule got, instead.")] = None,
    rules: RuleNames = None,
) -> None:
    """Say why operations are not in one region.

    With one operation, why it is in none; with a module or a source line, why that is not one region; with --rule, how
    far a rule got and on what it stopped.
    """  # fmt: skip
    if (first is None) == (rule is None):
        raise InvalidArgument("give an operation, a module or a source line, or --rule.")
    loaded, gm = _fused(console, source, model, rules)
    asked = named_rules([rule]) if rule is not None else None
    ledger = explain(gm)
    if asked is not None:
        reasons = [reason for one in asked for reason in ledger.why_not(rule=one)]
    else:
        reasons = list(ledger.why_not(first, second))
    for reason in reasons:
        console.text(f"- {reason}")
    console.document({**loaded.summary(), "first": first, "second": second, "rule": rule, "reasons": reasons})


def fuse_model(
    console: Console,
    source: ModelSource,
    model: Model,
    rules: RuleNames = None,
    must: Annotated[list[str] | None, typer.Option(metavar="WHAT", help="What must be in a region: a name, kind or module path; may be repeated.")] = None,
    never: Annotated[list[str] | None, typer.Option(metavar="WHAT", help="What must be in no region: a name, kind or module path; may be repeated.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the fused graph to a file; its suffix is as for `convert`.")] = None,
    report_to: Annotated[Path | None, typer.Option("--report", metavar="FILE", help="Write the report to an HTML file.")] = None,
) -> None:  # fmt: skip
    """Fuse a model, and write the result to a file.

    The graph computes what the model does, and `dovetail.load` and `torch.export.load` open the file.
    """
    write = None if output is None else _writer(output)
    require_folder(report_to)
    options = {name: tuple(values) for name, values in (("must", must), ("never", never)) if values}
    loaded, gm = _fused(console, source, model, rules, **options)
    ledger = explain(gm)
    console.text(f"{loaded}\n", style="strong")
    console.text(str(ledger))
    if write is not None and output is not None:
        with console.step(f"writing {output}"):
            write(gm, output)
        _wrote(console, output)
    if report_to is not None:
        with console.step(f"writing {report_to}"):
            report(gm, report_to)
        _wrote(console, report_to)
    if console.as_json:
        written = {"output": _text(output), "report": _text(report_to)}
        console.document({**_ledger_document(loaded, gm, ledger), **written})


def _wrote(console: Console, path: Path) -> None:
    console.text(f"wrote {path} ({amount(path.stat().st_size)})")


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def write_report(
    console: Console,
    source: ModelSource,
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The HTML file.")] = Path("report.html"),
    compare: Annotated[str | None, typer.Option(metavar="MODEL", help="A second program, shown beside the first.")] = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="A plan, which is applied: its program, with measured times.")] = None,
    profile: Annotated[Path | None, typer.Option(metavar="FILE", help="A trace that torch.profiler exported.")] = None,
    rules: RuleNames = None,
) -> None:  # fmt: skip
    """Write a page to look at about a model.

    It has the program by module, every decision with its reason, and bytes and time. The model is fused unless it is
    already. With --plan it is compiled by the plan instead, without measuring; exits with 1 if nothing of it fits.
    """
    require_folder(output)
    own, *others = source.for_each(model, *filter(None, [compare]))
    if plan is not None and rules:
        raise InvalidArgument("give --plan or --rules: a plan has the regions that were measured.")
    tuned = None if plan is None else Plan.load(plan)
    program: GraphModule | CompiledModule
    if tuned is None:
        loaded, program = _fused(console, own, model, rules)
    else:
        loaded = load_model(console, own, model)
        program = _planned(console, loaded, tuned)
    other = None if compare is None else load_model(console, others[0], compare).graph()
    with console.step(f"writing {output}"):
        report(program, output, compare=other, profile=profile)
    _wrote(console, output)
    console.document({**loaded.summary(), "report": str(output), "bytes": output.stat().st_size})


def _planned(console: Console, loaded: LoadedModel, plan: Plan) -> CompiledModule:
    """Return a model compiled by a plan; raise PlanMismatch if the plan has no decision for any part of it."""
    call = loaded.model, loaded.args, loaded.kwargs
    # A plan for inference was measured without gradients, and may not hold with them.
    with torch.set_grad_enabled(loaded.model.training):
        with console.step("applying the plan"):
            _require_decisions(plan, *call)
        with console.step(f"compiling {loaded.label}", is_long=True):
            return compile(*call, plan=plan)


def _require_decisions(
    plan: Plan, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise PlanMismatch with what `plan check` says if a plan has no decision for any part of a model."""
    gm = capture_for_plan(model, args, kwargs, plan)
    application = PlanApplication(plan, "training" if gm.training else "inference", environment_of(gm))
    if application.apply(gm).used:
        return
    try:
        plan.check(model, args, kwargs)
    except PlanMismatch as mismatch:
        # Its advice is for `Plan.check`.
        raise PlanMismatch(mismatch.problems) from mismatch


def convert(
    console: Console,
    source: ModelSource,
    model: Model,
    output: Annotated[Path, typer.Argument(metavar="FILE", help="Its suffix says what is written: .pt2, .onnx, .mlir or .stablehlo (StableHLO text), .mlirbc (its bytecode), or .json (Model Explorer).", show_default=False)],
    rules: RuleNames = None,
) -> None:  # fmt: skip
    """Write a fused graph in another format.

    Its regions are local functions of ONNX, composites of StableHLO. A model is captured and fused first.
    """
    write = _writer(output)
    loaded, gm = _fused(console, source, model, rules)
    with console.step(f"writing {output}"):
        write(gm, output)
    _wrote(console, output)
    if console.as_json:
        facts = {"output": str(output), "bytes": output.stat().st_size, "format": _WRITERS[output.suffix][0]}
        console.document({**loaded.summary(), **facts, "regions": len(regions(gm))})


def _writer(path: Path) -> Any:
    if path.suffix not in _WRITERS:
        raise InvalidArgument(
            f"'{path}': there is no format for the suffix '{path.suffix}'. There are {', '.join(_WRITERS)}."
        )
    require_folder(path)
    return _WRITERS[path.suffix][1]


def require_folder(path: Path | None) -> None:
    """Raise InvalidArgument unless a file can be in the folder of a path, before there is anything to write."""
    if path is not None and not path.parent.is_dir():
        raise InvalidArgument(f"'{path}': there is no folder '{path.parent}'.")
    if path is not None and path.is_dir():
        raise InvalidArgument(f"'{path}' is a folder; give the name of a file.")


def diff_models(
    console: Console,
    source: ModelSource,
    first: Model,
    second: Model,
    context: Annotated[int, typer.Option(metavar="LINES", help="Unchanged lines around a change.")] = 3,
    rules: RuleNames = None,
) -> int:
    """Show what differs between two programs.

    They are lined up by structure, whatever the names. Exits with 1 if anything differs.

    Files are compared as they are. Models are captured, and fused if --rules are given.
    """  # fmt: skip
    chosen = named_rules(rules)
    sides: list[GraphModule] = []
    names = first, second
    for name, own in zip(names, source.for_each(*names), strict=True):
        loaded = load_model(console, own, name)
        with console.step(f"capturing {name}"):
            fuses = chosen is not None and not name.endswith(".pt2")
            sides.append(loaded.fused_graph(chosen) if fuses else loaded.graph())
    difference = diff(*sides, context=context)
    for line in difference.splitlines():
        console.text(line, style="good" if line[:1] == "+" else "bad" if line[:1] == "-" else "")
    changed = sum(line.startswith(("+", "-")) for line in difference.splitlines())
    console.text(f"{counted(changed, 'line')} differ" if changed else "no difference", style="strong")
    console.document(
        {"first": first, "second": second, "equal": not difference, "difference": difference.splitlines()}
    )
    return FAILURE if difference else SUCCESS
