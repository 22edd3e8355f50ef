"""The public surface: exactly what is meant, documented, typed, and cheap to import."""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import pytest

import dovetail
import dovetail.zoo

# Growing this list is a decision: what is here is documented, tested and kept.
PUBLIC = [
    "Backend",
    "BundleMismatch",
    "CallMismatch",
    "Candidate",
    "CaptureError",
    "CaptureMismatch",
    "ChannelsLast",
    "Cleanup",
    "Const",
    "Cost",
    "CostModel",
    "CyclicRegion",
    "Decline",
    "DovetailError",
    "EffectOrder",
    "EmptyRegion",
    "Escape",
    "EscapingValue",
    "FoldConstants",
    "FoldConvBatchNorm",
    "Fuse",
    "Gain",
    "Inline",
    "InvalidArgument",
    "InvalidFile",
    "InvalidGraph",
    "Ledger",
    "Limits",
    "Lower",
    "LoweringError",
    "Match",
    "MergeParallel",
    "Outline",
    "OverlappingRegions",
    "Part",
    "Pass",
    "PassError",
    "Pipeline",
    "Plan",
    "PlanMismatch",
    "Refusal",
    "Region",
    "RegionError",
    "Repeat",
    "Request",
    "Rule",
    "RuleContext",
    "RuleError",
    "RuleSet",
    "SaveError",
    "Schedule",
    "ScheduleError",
    "StoreError",
    "Traffic",
    "TuningError",
    "UnknownNode",
    "UnknownPart",
    "UnknownRegion",
    "Value",
    "VerificationError",
    "bisect",
    "bisect_lowering",
    "bundle",
    "capture",
    "check",
    "compile",
    "declare",
    "diff",
    "either",
    "explain",
    "export_measurements",
    "fuse",
    "fuse_modules",
    "import_measurements",
    "inline",
    "load",
    "lower",
    "optional",
    "outline",
    "refresh",
    "regions",
    "replace_region",
    "report",
    "rule",
    "save",
    "schedule",
    "solution_backend",
    "text",
    "to_flashinfer_trace",
    "to_model_explorer",
    "to_onnx",
    "to_stablehlo",
    "tune",
]

# The arguments that may be given by position; all others are keyword-only.
POSITIONAL = {
    "Part.annotate": ["self", "target", "attrs"],
    "Part.checkpoint": ["self", "target"],
    "Part.decompose": ["self", "target"],
    "Part.find": ["self", "what"],
    "Part.fuse": ["self", "matches"],
    "Part.lower": ["self", "target", "backends"],
    "Part.replace": ["self", "new", "target"],
    "Part.replace_all": ["self", "what", "factory"],
    "Schedule.apply": ["self", "primitive", "args", "kwargs"],
    "Schedule.build": ["self"],
    "Schedule.example": ["self", "args", "kwargs"],
    "Schedule.print": ["self"],
    "Schedule.release": ["self"],
    "Schedule.replay": ["self", "history"],
    "Schedule.text": ["self"],
    "Schedule.undo": ["self", "steps"],
    "Schedule.verify": ["self"],
    "Schedule.verifying": ["self", "options"],
    "schedule": ["model", "args", "kwargs"],
    "fuse_modules": ["model", "modules_to_fuse", "args", "kwargs"],
    "capture": ["model", "args", "kwargs"],
    "check": ["gm"],
    "declare": ["gm", "what"],
    "diff": ["a", "b"],
    "inline": ["gm", "name"],
    "outline": ["gm", "nodes"],
    "refresh": ["compiled"],
    "regions": ["gm"],
    "text": ["gm"],
    "Region.export": ["self", "folder"],
    "Region.reproducer": ["self", "path"],
    "Backend.compile": ["self", "region", "examples"],
    "Backend.compile_async": ["self", "region", "examples"],
    "Backend.implements": ["self", "hook"],
    "Backend.load": ["self", "data", "region"],
    "Backend.prepare": ["self", "site"],
    "Backend.save": ["self", "compiled"],
    "Backend.settle": ["self", "lowered"],
    "Backend.supports": ["self", "region"],
    "Backend.warm": ["self"],
    "ChannelsLast.explain": ["self", "gm"],
    "ChannelsLast.run": ["self", "gm"],
    "Cleanup.run": ["self", "gm"],
    "CostModel.freed": ["self", "figures", "position"],
    "CostModel.gain": ["self", "figures", "draft"],
    "FoldConstants.explain": ["self", "gm"],
    "FoldConstants.run": ["self", "gm"],
    "FoldConvBatchNorm.explain": ["self", "gm"],
    "FoldConvBatchNorm.run": ["self", "gm"],
    "Fuse.run": ["self", "gm"],
    "Inline.run": ["self", "gm"],
    "Ledger.coverage": ["self"],
    "Ledger.outside": ["self"],
    "Ledger.to_json": ["self"],
    "Lower.run": ["self", "gm"],
    "Ledger.why_not": ["self", "first", "second"],
    "MergeParallel.explain": ["self", "gm"],
    "MergeParallel.guard": ["branches"],
    "MergeParallel.run": ["self", "gm"],
    "Outline.run": ["self", "gm"],
    "Plan.check": ["self", "model", "args", "kwargs"],
    "Plan.diff": ["self", "other"],
    "Plan.explain": ["self"],
    "Plan.lookup": ["self", "decisions", "key", "mode", "environment"],
    "Plan.dynamic_shapes": ["self", "forward", "args", "kwargs"],
    "Plan.planned": ["self", "gm"],
    "Plan.save": ["self", "path"],
    "Plan.to_json": ["self"],
    "Plan.with_decisions": ["self", "mode", "environment", "decisions"],
    "Pass.explain": ["self", "gm"],
    "Pass.run": ["self", "gm"],
    "Pipeline.walk": ["self", "gm", "leaf", "place"],
    "Repeat.walk": ["self", "gm", "leaf", "place"],
    "Rule.propose": ["self", "context"],
    "Rule.why_not": ["self", "context", "first", "second"],
    "RuleContext.analysis": ["self", "compute"],
    "RuleContext.fact": ["self", "make"],
    "RuleContext.kind_of": ["self", "position"],
    "RuleContext.module_path": ["self", "position"],
    "RuleContext.value": ["self", "position"],
    "Traffic.apart": ["self", "figures", "draft"],
    "Traffic.freed": ["self", "figures", "position"],
    "Traffic.gain": ["self", "figures", "draft"],
    "Traffic.together": ["self", "figures", "draft"],
    "bisect": ["pipeline", "gm", "still_good"],
    "bisect_lowering": ["gm", "still_good"],
    "compile": ["model", "args", "kwargs"],
    "either": ["alternatives"],
    "explain": ["gm"],
    "fuse": ["gm", "rules"],
    "load": ["path"],
    "lower": ["gm", "backends"],
    "optional": ["value", "step"],
    "replace_region": ["gm", "name_or_key", "callable"],
    "report": ["x", "path"],
    "rule": ["function", "options"],
    "save": ["gm", "path"],
    "bundle": ["compiled", "path"],
    "export_measurements": ["store", "path"],
    "import_measurements": ["path", "store"],
    "solution_backend": ["paths"],
    "to_flashinfer_trace": ["gm", "folder"],
    "to_model_explorer": ["gm", "path"],
    "to_onnx": ["gm", "path"],
    "to_stablehlo": ["gm"],
    "tune": ["model", "args", "kwargs"],
}

# A base install has none of these, or they cost more than everything else together.
HEAVY = [
    "typer",
    "dovetail.cli",
    "torch._inductor",
    "torch._dynamo",
    "torch.onnx",
    "triton",
    "transformers",
    "matplotlib",
    "pandas",
    "onnx",
    "onnxruntime",
    "openvino",
    "tvm",
    "jax",
    "torch_mlir",
    "sqlalchemy",
    "optuna",
    "scipy",
    "rich",
]


def classes() -> Iterator[tuple[str, type]]:
    for name in dovetail.__all__:
        value = getattr(dovetail, name)
        if inspect.isclass(value):
            yield name, value


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, and the methods and constructors that public classes write out themselves."""
    for name in dovetail.__all__:
        value = getattr(dovetail, name)
        if not inspect.isclass(value) and not inspect.ismodule(value):
            yield name, value
    for name, cls in classes():
        for member, value in vars(cls).items():
            function = value.fget if isinstance(value, property) else value
            is_public = member == "__init__" or not member.startswith("_")
            if is_public and inspect.isfunction(function) and function.__module__.startswith("dovetail"):
                yield f"{name}.{member}", function


FUNCTIONS = [pytest.param(name, function, id=name) for name, function in functions()]
CLASSES = [pytest.param(name, cls, id=name) for name, cls in classes()]


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(dovetail.__all__) == sorted(PUBLIC)
    assert len(set(dovetail.__all__)) == len(dovetail.__all__)
    assert set(dovetail.__all__) <= set(dir(dovetail))


def test_every_error_has_the_one_root() -> None:
    errors = [cls for _, cls in classes() if issubclass(cls, BaseException)]
    assert errors
    assert all(issubclass(cls, dovetail.DovetailError) for cls in errors)


@pytest.mark.parametrize(("name", "cls"), CLASSES)
def test_classes_are_documented_and_typed(name: str, cls: type) -> None:
    # Not inspect.getdoc: that takes the base class's word for it. A dataclass without one lists its fields.
    doc = cls.__doc__ or ""
    assert doc.strip(), f"{name} has no docstring"
    assert not doc.startswith(f"{cls.__name__}("), f"{name} has only a generated docstring"
    get_type_hints(cls)


@pytest.mark.parametrize(("name", "function"), FUNCTIONS)
def test_functions_are_documented_and_fully_annotated(name: str, function: Callable[..., Any]) -> None:
    if not name.endswith("__init__"):
        assert (function.__doc__ or "").strip(), f"{name} has no docstring"
    hints = get_type_hints(function)
    parameters = [p for p in inspect.signature(function).parameters if p != "self"]
    assert not [p for p in [*parameters, "return"] if p not in hints]


@pytest.mark.parametrize("name", POSITIONAL)
def test_only_the_first_arguments_are_positional(name: str) -> None:
    function: Any = dovetail
    for atom in name.split("."):
        function = getattr(function, atom)
    given = inspect.signature(function).parameters.values()
    assert [p.name for p in given if p.kind is not p.KEYWORD_ONLY] == POSITIONAL[name]


def test_every_public_function_declares_what_is_positional() -> None:
    stated = {name for name, _ in functions() if not name.endswith("__init__")}
    properties = {name for name in stated if _is_property(name)}
    assert stated - properties == set(POSITIONAL)


def _is_property(name: str) -> bool:
    owner, _, member = name.rpartition(".")
    return bool(owner) and isinstance(vars(getattr(dovetail, owner)).get(member), property)


IMPORT = """
import json, sys, time
start = time.process_time()
import torch
middle = time.process_time()
before = set(sys.modules)
import dovetail
end = time.process_time()
print(json.dumps({"torch": middle - start, "ours": end - middle, "new": sorted(set(sys.modules) - before)}))
"""


def test_importing_costs_little_beyond_torch() -> None:
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, check=True
        )
        measured = json.loads(done.stdout)
        heavy = [m for m in measured["new"] if any(m == h or m.startswith(f"{h}.") for h in HEAVY)]
        assert not heavy
        assert not {"dovetail.zoo", "dovetail.rules.library"} & set(measured["new"])
        # Three quarters of torch's own time are usual, a third of it sympy, which torch itself imports when it traces.
        # Time of the process, not of the clock, and once in four: other tests run meanwhile.
        if measured["ours"] < measured["torch"]:
            return
    assert measured["ours"] < measured["torch"]


def test_no_name_is_public_by_accident() -> None:
    for module in (dovetail, dovetail.rules, dovetail.rules.library, dovetail.backends, dovetail.zoo):
        inner = {m.rpartition(".")[2] for m in sys.modules if m.rpartition(".")[0] == module.__name__}
        leaked = {n for n in vars(module) if not n.startswith("_")} - inner - set(module.__all__)
        assert not leaked, module.__name__
        shown = {n for n in dir(module) if not n.startswith("_")}
        assert shown - set(module.__all__) <= {"backends", "config", "errors", "rules"}
        assert set(module.__all__) <= shown
    with pytest.raises(AttributeError, match="no attribute 'Any'"):
        dovetail.Any  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="Did you mean 'fuse'"):
        dovetail.fuze  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"'dovetail\.from_onnx' was removed\. Load the file with"):
        dovetail.from_onnx  # type: ignore[attr-defined]  # noqa: B018


BACKENDS = """
import sys
from dovetail.backends import Int8, OnnxRuntime, __all__
import dovetail.backends as b
from dovetail.lowering.backend_protocol import built_in, by_name
assert not {"onnxruntime", "openvino", "tvm", "jax", "torch._inductor"} & set(sys.modules)
assert all(issubclass(getattr(b, name), b.Backend) for name in __all__)
assert {"Backend", *(type(by_name(name)).__name__ for name in built_in())} == set(__all__)
"""


def test_backends_are_importable_without_what_they_need() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", BACKENDS], check=True)


def test_a_call_that_fits_no_signature_names_what_does() -> None:
    for call, reason in (
        (lambda: dovetail.compile(None, backend="eager"), "no argument 'backend'. Did you mean 'backends'"),  # type: ignore
        (lambda: dovetail.fuse(None, strict=True), "give on_error='raise'"),  # type: ignore
        (lambda: dovetail.Fuse(rule=()), "Did you mean 'rules'"),  # type: ignore
        (lambda: dovetail.lower(), "missing a required argument: 'gm'.*lower\\(gm, backends"),  # type: ignore
        (lambda: dovetail.regions(None, "kind"), "too many positional arguments.*kind=None"),  # type: ignore
        (lambda: dovetail.Limits(node=1), "Did you mean 'nodes'"),  # type: ignore
        (lambda: dovetail.rule(kind="k", prioritty=1)(abs), "Did you mean 'priority'"),  # type: ignore
    ):
        with pytest.raises(dovetail.InvalidArgument, match=reason):
            call()
