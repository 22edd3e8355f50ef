"""Operator fusion as a graph-to-graph step of its own for PyTorch."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from dovetail import backends as backends
from dovetail import rules as rules
from dovetail.errors import (
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
    RegionError,
    RuleError,
    SaveError,
    ScheduleError,
    UnknownNode,
    UnknownPart,
    UnknownRegion,
    VerificationError,
)
from dovetail.errors import did_you_mean as _did_you_mean
from dovetail.fusion.cost import Cost, CostModel, Gain, Traffic
from dovetail.fusion.fuse import fuse
from dovetail.fusion.ledger import Ledger, explain
from dovetail.graph.capture import capture
from dovetail.graph.check import check
from dovetail.graph.declaring import declare
from dovetail.graph.text import diff, text
from dovetail.lowering.backend import Backend
from dovetail.lowering.bisect import bisect_lowering
from dovetail.lowering.compile import compile
from dovetail.lowering.compiled import refresh
from dovetail.lowering.lower import lower
from dovetail.lowering.passes import Lower
from dovetail.outlining.inline import inline
from dovetail.outlining.outline import outline
from dovetail.outlining.record import Escape
from dovetail.outlining.region import Region, regions
from dovetail.outlining.requests import Request
from dovetail.passes.base import Pass
from dovetail.passes.bisect import bisect
from dovetail.passes.cleanup import Cleanup
from dovetail.passes.fold_constants import FoldConstants
from dovetail.passes.fold_conv_batch_norm import FoldConvBatchNorm
from dovetail.passes.fuse import Fuse
from dovetail.passes.inline import Inline
from dovetail.passes.merge_parallel import MergeParallel
from dovetail.passes.outline import Outline
from dovetail.passes.pipeline import Pipeline, Repeat
from dovetail.rules.limits import Limits
from dovetail.rules.matching.choices import Const, either, optional
from dovetail.rules.matching.match import Match, Value
from dovetail.rules.pattern import rule
from dovetail.rules.rule import Candidate, Decline, Refusal, Rule, RuleSet
from dovetail.rules.scene import Scene

if _TYPE_CHECKING:
    from dovetail.interop.loading import load
    from dovetail.interop.onnx_writing import to_onnx
    from dovetail.interop.replacement import replace_region
    from dovetail.interop.saving import save
    from dovetail.interop.stablehlo import to_stablehlo
    from dovetail.scheduling.fuse_modules import fuse_modules
    from dovetail.scheduling.part import Part
    from dovetail.scheduling.schedule import Schedule, schedule

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "CallMismatch",
    "Candidate",
    "CaptureError",
    "CaptureMismatch",
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
    "Refusal",
    "Region",
    "RegionError",
    "Repeat",
    "Request",
    "Rule",
    "RuleError",
    "RuleSet",
    "SaveError",
    "Scene",
    "Schedule",
    "ScheduleError",
    "Traffic",
    "UnknownNode",
    "UnknownPart",
    "UnknownRegion",
    "Value",
    "VerificationError",
    "bisect",
    "bisect_lowering",
    "capture",
    "check",
    "compile",
    "declare",
    "diff",
    "either",
    "explain",
    "fuse",
    "fuse_modules",
    "inline",
    "load",
    "lower",
    "optional",
    "outline",
    "refresh",
    "regions",
    "replace_region",
    "rule",
    "save",
    "schedule",
    "text",
    "to_onnx",
    "to_stablehlo",
]

# Loaded when first asked for: who only fuses graphs need not wait for it.
_LATER = {
    "Part": "dovetail.scheduling.part",
    "Schedule": "dovetail.scheduling.schedule",
    "fuse_modules": "dovetail.scheduling.fuse_modules",
    "load": "dovetail.interop.loading",
    "replace_region": "dovetail.interop.replacement",
    "save": "dovetail.interop.saving",
    "schedule": "dovetail.scheduling.schedule",
    "to_onnx": "dovetail.interop.onnx_writing",
    "to_stablehlo": "dovetail.interop.stablehlo",
}

# Names that there were, with what to do instead.
_REMOVED = {
    "from_onnx": "Load the file with ONNX's own tools (onnx.load, onnxruntime); `dovetail.save` and `dovetail.load` keep "
    "a graph with its regions.",
}


def __getattr__(name: str) -> _Any:
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
