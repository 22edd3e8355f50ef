"""Operator fusion as a graph-to-graph step of its own for PyTorch."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from dovetail import backends as backends
from dovetail import rules as rules
from dovetail.errors import (
    BundleMismatch,
    CallMismatch,
    CaptureError,
    CaptureMismatch,
    CyclicRegion,
    DovetailError,
    EffectOrder,
    EmptyRegion,
    EscapingValue,
    InvalidArgument,
    InvalidFile,
    InvalidGraph,
    LoweringError,
    OverlappingRegions,
    PassError,
    PlanMismatch,
    RegionError,
    RuleError,
    SaveError,
    ScheduleError,
    StoreError,
    TuningError,
    UnknownNode,
    UnknownPart,
    UnknownRegion,
    VerificationError,
)
from dovetail.errors import did_you_mean as _did_you_mean
from dovetail.frontend.capture import capture
from dovetail.fusion.cost import Cost, CostModel, Gain, Traffic
from dovetail.fusion.fuse import fuse
from dovetail.fusion.ledger import Ledger, explain
from dovetail.ir.effects import declare
from dovetail.ir.printer import diff, text
from dovetail.ir.verifier import check
from dovetail.lowering.backend_protocol import Backend
from dovetail.lowering.bisect_lowering import bisect_lowering
from dovetail.lowering.lower import Lower, lower, replace_region
from dovetail.outlining.inline import inline
from dovetail.outlining.outline import Request, outline
from dovetail.outlining.region import Escape, Region, regions
from dovetail.outlining.region import RegionWriter as _RegionWriter
from dovetail.outlining.region import install_writers as _install_writers
from dovetail.passes.bisect_passes import bisect
from dovetail.passes.channels_last import ChannelsLast
from dovetail.passes.cleanup import Cleanup
from dovetail.passes.fold_constants import FoldConstants
from dovetail.passes.fold_conv_batch_norm import FoldConvBatchNorm
from dovetail.passes.merge_parallel.merge_parallel import MergeParallel
from dovetail.passes.pass_manager import Pass, Pipeline, Repeat
from dovetail.passes.region_passes import Fuse, Inline, Outline
from dovetail.rules.patterns.alternatives import Const, either, optional
from dovetail.rules.patterns.match_state import Match, Value
from dovetail.rules.patterns.pattern_rule import rule
from dovetail.rules.rule import Candidate, Decline, Limits, Refusal, Rule, RuleContext, RuleSet
from dovetail.runtime.bundle import bundle
from dovetail.runtime.compile import compile
from dovetail.runtime.compiled_module import refresh
from dovetail.runtime.presets import PlanPath as _PlanPath
from dovetail.runtime.presets import install_plan_reader as _install_plan_reader

if _TYPE_CHECKING:
    from dovetail.backends.solutions import solution_backend
    from dovetail.formats.archive.load import load
    from dovetail.formats.archive.save import save
    from dovetail.formats.model_explorer import to_model_explorer
    from dovetail.formats.onnx.to_onnx import to_onnx
    from dovetail.formats.stablehlo import to_stablehlo
    from dovetail.reporting.report import report
    from dovetail.scheduling.fuse_modules import fuse_modules
    from dovetail.scheduling.part import Part
    from dovetail.scheduling.schedule import Schedule, schedule
    from dovetail.tuning.flashinfer_traces import to_flashinfer_trace
    from dovetail.tuning.measurement_files import export_measurements, import_measurements
    from dovetail.tuning.plan import Plan
    from dovetail.tuning.tune import tune

__version__ = "0.1.0"

__all__ = [
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


def _artifact_writer() -> _RegionWriter:
    from dovetail.formats.region_artifact import write_artifact

    return write_artifact


def _reproducer_writer() -> _RegionWriter:
    from dovetail.formats.region_artifact import write_reproducer

    return write_reproducer


_install_writers(export=_artifact_writer, reproducer=_reproducer_writer)


def _read_plan(path: _PlanPath) -> "Plan":
    from dovetail.tuning.plan import Plan

    return Plan.load(path)


_install_plan_reader(_read_plan)

# Imported on first access, so that `import dovetail` stays short.
_LATER = {
    "Part": "dovetail.scheduling.part",
    "Plan": "dovetail.tuning.plan",
    "Schedule": "dovetail.scheduling.schedule",
    "export_measurements": "dovetail.tuning.measurement_files",
    "fuse_modules": "dovetail.scheduling.fuse_modules",
    "import_measurements": "dovetail.tuning.measurement_files",
    "load": "dovetail.formats.archive.load",
    "report": "dovetail.reporting.report",
    "save": "dovetail.formats.archive.save",
    "schedule": "dovetail.scheduling.schedule",
    "solution_backend": "dovetail.backends.solutions",
    "to_flashinfer_trace": "dovetail.tuning.flashinfer_traces",
    "to_model_explorer": "dovetail.formats.model_explorer",
    "to_onnx": "dovetail.formats.onnx.to_onnx",
    "to_stablehlo": "dovetail.formats.stablehlo",
    "tune": "dovetail.tuning.tune",
}

# Names that there were, with what to do instead.
_REMOVED = {
    "from_onnx": "Load the file with ONNX's own tools (onnx.load, onnxruntime); `dovetail.save` and `dovetail.load` keep "
    "a graph with its regions.",
}


_RENAMED = {"Scene": "RuleContext"}


def __getattr__(name: str) -> _Any:
    if name in _RENAMED:
        import warnings

        warnings.warn(f"dovetail.{name} is now dovetail.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return globals()[_RENAMED[name]]
    if name in _REMOVED:
        raise AttributeError(f"'dovetail.{name}' was removed. {_REMOVED[name]}")
    if name not in _LATER:
        hint = _did_you_mean(name, __all__)
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}. {hint}".rstrip(" "))
    value = globals()[name] = getattr(_import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    public = {*__all__, "backends", "config", "errors", "rules"}
    return sorted(public | {name for name in globals() if name.startswith("__")})
