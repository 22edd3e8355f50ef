"""Versions of ONNX: what an operator does depends on the opset that a file is of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dovetail.errors import InvalidFile
from dovetail.lowering.faults import in_a_line
from dovetail.lowering.onnx.writer import OPSET

OLDEST, NEWEST = 13, 26
"""The opsets between which the operators that are read mean what is read; before, softmax flattened what it was given."""


def current(model: Any, path: Any) -> Any:
    """The model in an opset that is read: an older one is converted. InvalidFile says why there is none."""
    for function in model.functions:
        opset = _opset(function.opset_import, function.node)
        if not OLDEST <= opset <= NEWEST:
            where = f"has a function '{function.name}' of"
            raise InvalidFile(path, f"{where} opset {opset}; functions are read from {OLDEST} to {NEWEST}.")
    opset = _opset(model.opset_import, model.graph.node)
    if opset > NEWEST:
        raise InvalidFile(
            path, f"is of opset {opset}, and read up to {NEWEST}. Convert it with onnx.version_converter."
        )
    if opset >= OLDEST:
        return model
    if model.functions:
        raise InvalidFile(
            path, f"is of opset {opset} and has functions: onnx converts none to {OLDEST} or later."
        )
    from onnx import version_converter

    try:
        return version_converter.convert_version(model, OPSET)
    except Exception as error:
        raise InvalidFile(
            path, f"is of opset {opset}, which onnx does not convert to {OPSET}: {in_a_line(error)}."
        ) from error


def _opset(imports: Iterable[Any], nodes: Iterable[Any]) -> int:
    """The opset that operators of ONNX itself are of. Files from before there were opsets are of the first."""
    own = ("", "ai.onnx")
    found = [o.version for o in imports if o.domain in own]
    return max(found) if found else 1 if any(n.domain in own for n in nodes) else OPSET
