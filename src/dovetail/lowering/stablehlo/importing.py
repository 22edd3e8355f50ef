"""Flat graphs as StableHLO, by way of torch-mlir."""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph

from dovetail.graph.forking import released_by_fork
from dovetail.lowering.backends.foreign import NoForm, loaded

PACKAGE = "torch_mlir"

_PIPELINES = (
    "builtin.module(torchdynamo-export-to-torch-backend-pipeline{extra-library=})",
    "builtin.module(torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})",
    # Where an operation came from is a path on this machine.
    "builtin.module(strip-debuginfo)",
)
_CONVERTING = released_by_fork(threading.Lock())


def missing() -> str | None:
    """What to install; None if it is there."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "torch_mlir is not installed; pip install 'dovetail[stablehlo]'"
    return None


def module_of(graphs: Mapping[str, Graph]) -> Any:
    """A module with a function for each graph, in StableHLO; every node has a fake of its value.

    Products are as exact as torch makes them: in float32 throughout, unless torch was told otherwise.
    """
    ir = loaded("torch_mlir.ir")
    manager = loaded("torch_mlir.passmanager").PassManager
    importing = loaded("torch_mlir.extras.fx_importer").FxImporter
    with _CONVERTING:
        context = ir.Context()
        loaded("torch_mlir.dialects.torch").register_dialect(context)
        try:
            importer = importing(context=context)
            for name, graph in graphs.items():
                importer.import_stateless_graph(graph, func_name=name)
            module = importer.module
            with context:
                for pipeline in _PIPELINES:
                    manager.parse(pipeline).run(module.operation)
        except Exception as error:
            raise NoForm(_reason(error)) from error
        with context, ir.Location.unknown():
            _settle(ir, module)
    return module


def portable(module: Any) -> bytes:
    """A module as bytes that StableHLO has read for twelve weeks, and will read for years."""
    library = loaded("torch_mlir._mlir_libs._stablehlo")
    needed = library.StablehloCompatibilityRequirement.WEEK_12
    return library.serialize_portable_artifact(
        module, library.get_version_from_compatibility_requirement(needed)
    )


def operations(owner: Any) -> Iterator[Any]:
    """All operations inside of one, those of nested regions included."""
    for region in owner.regions:
        for block in region.blocks:
            for op in list(block.operations):
                yield op
                yield from operations(op)


def _settle(ir: Any, module: Any) -> None:
    """Leave nothing but StableHLO and functions, and say how exact products are."""
    exact = torch.get_float32_matmul_precision() == "highest"
    word = "HIGHEST" if exact else "DEFAULT"
    precision = ir.Attribute.parse(f"[#stablehlo<precision {word}>, #stablehlo<precision {word}>]")
    for op in list(operations(module.operation)):
        name = op.operation.name
        if name == "arith.constant":
            with ir.InsertionPoint(op):
                made = ir.Operation.create(
                    "stablehlo.constant",
                    results=[op.operation.result.type],
                    attributes={"value": op.operation.attributes["value"]},
                )
            op.operation.result.replace_all_uses_with(made.result)
            op.operation.erase()
        elif name == "stablehlo.compare" and _is_unsigned(ir, op):
            op.operation.attributes["compare_type"] = ir.Attribute.parse(
                "#stablehlo<comparison_type UNSIGNED>"
            )
        elif name == "stablehlo.compare" and op.operation.parent.name == "stablehlo.sort":
            # What is no number is the largest of all, as it is in torch.
            if "FLOAT" in str(op.operation.attributes["compare_type"]):
                op.operation.attributes["compare_type"] = ir.Attribute.parse(
                    "#stablehlo<comparison_type TOTALORDER>"
                )
        elif name in ("stablehlo.dot_general", "stablehlo.convolution"):
            op.operation.attributes["precision_config"] = precision
        elif name.partition(".")[0] not in ("stablehlo", "func", "builtin"):
            raise NoForm(f"torch-mlir leaves a {name}")


def _is_unsigned(ir: Any, op: Any) -> bool:
    kind = ir.RankedTensorType(op.operation.operands[0].type).element_type
    return str(kind) == "i1" or str(kind).startswith("ui")


_FAILED = re.compile(r"(?:failed to legalize|unsupported|expected|error:)[^\n]*?'([a-z_0-9.]+)'")
_CALLED = re.compile(r'name = "(torch\.[a-z_0-9.A-Z]+)"')


def _reason(error: BaseException) -> str:
    text = str(error)
    found = _CALLED.search(text) or _FAILED.search(text)
    if found is not None:
        return f"torch-mlir has no StableHLO form of {found.group(1)}"
    line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"torch-mlir does not convert it: {line.strip()[:200]}"
