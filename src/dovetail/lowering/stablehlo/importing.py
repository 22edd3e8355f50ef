"""Flat graphs as StableHLO, by way of torch-mlir."""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph

from dovetail.lowering.backends.foreign import NoForm

PACKAGE = "torch_mlir"

_PIPELINES = (
    "builtin.module(torchdynamo-export-to-torch-backend-pipeline{extra-library=})",
    "builtin.module(torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})",
    # Where an operation came from is a path on this machine.
    "builtin.module(strip-debuginfo)",
)
_CONVERTING = threading.Lock()


def missing() -> str | None:
    """What to install; None if it is there."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "torch_mlir is not installed; pip install 'dovetail[stablehlo]'"
    return None


def module_of(graphs: Mapping[str, Graph]) -> Any:
    """A module with a function for each graph, in StableHLO; every node has a fake of its value.

    Products are as exact as torch makes them: in float32 throughout, unless torch was told otherwise.
    """
    from torch_mlir import ir
    from torch_mlir.dialects import torch as dialect
    from torch_mlir.extras.fx_importer import FxImporter
    from torch_mlir.passmanager import PassManager

    with _CONVERTING:
        context = ir.Context()
        dialect.register_dialect(context)
        try:
            importer = FxImporter(context=context)
            for name, graph in graphs.items():
                importer.import_stateless_graph(graph, func_name=name)
            module = importer.module
            with context:
                for pipeline in _PIPELINES:
                    PassManager.parse(pipeline).run(module.operation)
        except Exception as error:
            raise NoForm(_reason(error)) from error
        with context, ir.Location.unknown():
            _settle(ir, module)
    return module


def portable(module: Any) -> bytes:
    """A module as bytes that other versions of StableHLO read too."""
    from torch_mlir._mlir_libs import _stablehlo

    return _stablehlo.serialize_portable_artifact(module, _stablehlo.get_minimum_version())


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
        elif name in ("stablehlo.dot_general", "stablehlo.convolution"):
            op.operation.attributes["precision_config"] = precision
        elif name.partition(".")[0] not in ("stablehlo", "func", "builtin"):
            raise NoForm(f"torch-mlir leaves a {name}")


_FAILED = re.compile(r"(?:failed to legalize|unsupported|expected|error:)[^\n]*?'([a-z_0-9.]+)'")
_CALLED = re.compile(r'name = "(torch\.[a-z_0-9.A-Z]+)"')


def _reason(error: BaseException) -> str:
    text = str(error)
    found = _CALLED.search(text) or _FAILED.search(text)
    if found is not None:
        return f"torch-mlir has no StableHLO form of {found.group(1)}"
    line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"torch-mlir does not convert it: {line.strip()[:200]}"
