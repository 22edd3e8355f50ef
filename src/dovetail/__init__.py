"""Operator fusion as a graph-to-graph step of its own for PyTorch."""

from dovetail.errors import (
    CallMismatch,
    CaptureError,
    CyclicRegion,
    DovetailError,
    EffectOrder,
    EmptyRegion,
    EscapingValue,
    InvalidArgument,
    InvalidGraph,
    OverlappingRegions,
    RegionError,
    UnknownNode,
    UnknownRegion,
)
from dovetail.graph.capture import capture
from dovetail.graph.check import check
from dovetail.graph.declaring import declare
from dovetail.graph.text import diff, text
from dovetail.outlining.inline import inline
from dovetail.outlining.outline import outline
from dovetail.outlining.record import Escape
from dovetail.outlining.region import Region, regions
from dovetail.outlining.requests import Request

__version__ = "0.1.0"

__all__ = [
    "CallMismatch",
    "CaptureError",
    "CyclicRegion",
    "DovetailError",
    "EffectOrder",
    "EmptyRegion",
    "Escape",
    "EscapingValue",
    "InvalidArgument",
    "InvalidGraph",
    "OverlappingRegions",
    "Region",
    "RegionError",
    "Request",
    "UnknownNode",
    "UnknownRegion",
    "capture",
    "check",
    "declare",
    "diff",
    "inline",
    "outline",
    "regions",
    "text",
]
