"""Regions as definitions and workloads of FlashInfer-Trace, the exchange format of flashinfer-bench.

A definition names the axes, inputs and outputs of a computation and has a reference in torch; a workload gives the axes
values. Both were checked against the data model of flashinfer-bench 0.1.2. A definition is that of a distinct body with its
constants as operands: its name ends in the first digits of the body's key, so that a solution names exactly one body. Axes
are constants where the body is specialized for a size, variables where it has a symbol.
"""

from __future__ import annotations

import ast
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import torch
from torch import SymInt, Tensor

from dovetail.errors import InvalidArgument, RegionError
from dovetail.formats.atomic_write import atomic_replace, resolve_target
from dovetail.formats.region_artifact import body_source
from dovetail.ir.nodes import example_size
from dovetail.lowering.compile_unit import CompileUnit, unit_of
from dovetail.outlining.region import Region, results

DTYPES = frozenset(
    (
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "int32",
        "int16",
        "int8",
        "bool",
    )
)
"""The dtypes that the format and torch both have, by the name that they have in both."""
_SCALARS = {bool: "bool", int: "int64", float: "float32", SymInt: "int64"}


@dataclass(frozen=True)
class Definition:
    """A region in the format: the document of its definition, and its workload, None with `no_workload` as the reason."""

    name: str
    op_type: str
    document: Mapping[str, Any]
    workload: Mapping[str, Any] | None
    no_workload: str = ""


def definition_name(region: Region) -> str:
    """Return the name of the definition of a region, whose constants must be operands, as backends get it."""
    return f"{_op_type(region)}_{region.key[:16]}"


def why_not_defined(unit: CompileUnit) -> str | None:
    """Return why a body is not a function of its operands, as definitions are; None if it is."""
    effects = unit.effects
    if unit.obstacle is not None:
        return unit.obstacle
    if effects.host_effect:
        return f"it has effects on the host ({effects.host_effect})"
    if effects.random:
        return "it draws random numbers"
    return "it writes its operands" if effects.writes else None


def define_region(region: Region) -> Definition:
    """Return the definition of a region; raise RegionError with the reason if the format cannot express it."""
    unit = unit_of(region)
    reason = why_not_defined(unit)
    if reason is not None:
        raise RegionError(f"{reason}.")
    axes = _Axes()
    inputs = {
        name: axes.spec(value, f"operand '{name}'")
        for name, value in zip(_input_names(unit), unit.values, strict=True)
    }
    values = [node.meta.get("val") for node in results(unit.region.body)]
    names = ["output"] if len(values) == 1 else [f"output_{number}" for number in range(len(values))]
    outputs = {
        _free_name(name, inputs): axes.spec(value, f"result {number}")
        for number, (name, value) in enumerate(zip(names, values, strict=True))
    }
    name = definition_name(unit.region)
    attrs = json.dumps(region.attrs, sort_keys=True)
    document = {
        "name": name,
        "op_type": _op_type(region),
        "description": f"{region.kind} v{region.version} {attrs}",
        "tags": ["fused", f"kind:{region.kind}", f"dovetail_key:{unit.key}"],
        "axes": axes.documents,
        **({"constraints": axes.constraints} if axes.constraints else {}),
        "inputs": inputs,
        "outputs": outputs,
        "reference": _reference(unit, list(inputs), len(outputs)),
    }
    workload, no_workload = _workload(name, axes.hints, dict(zip(inputs, unit.values, strict=True)))
    return Definition(name, _op_type(region), document, workload, no_workload)


def write_dataset(
    folder: str | os.PathLike[str],
    definitions: Iterable[Definition],
    traces: Mapping[str, list[dict[str, Any]]],
) -> Path:
    """Write definitions, workloads and traces, the latter by definition, to the folders of a dataset; return its path.

    Files of the same names are replaced, others are left as they are.
    """
    root = Path(folder)
    for definition in definitions:
        document = json.dumps(definition.document, indent=2, ensure_ascii=False)
        _write(root, "definitions", definition, ".json", f"{document}\n")
        if definition.workload is not None:
            record = {"definition": definition.name, "workload": definition.workload}
            _write(root, "workloads", definition, ".jsonl", f"{json.dumps(record)}\n")
        records = traces.get(definition.name)
        if records:
            _write(root, "traces", definition, ".jsonl", "".join(f"{json.dumps(r)}\n" for r in records))
    return root


def checked_folder(folder: Any) -> Path:
    """Return the path of a folder to write a dataset to, which need not exist."""
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(cast("str", folder)):
        raise InvalidArgument(f"folder {folder!r} is not the name of a folder.")
    path = Path(cast("str", folder))
    if path.exists() and not path.is_dir():
        raise InvalidArgument(f"'{path}' is a file; give the name of a folder.")
    return path


class _Axes:
    """The axes of a definition: a constant for each size, a variable for each symbolic one."""

    def __init__(self) -> None:
        self.documents: dict[str, dict[str, Any]] = {}
        self.constraints: list[str] = []
        self.hints: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._symbols: dict[Any, Any] = {}

    def spec(self, value: Any, what: str) -> dict[str, Any]:
        """Return the specification of a tensor or a number."""
        if not isinstance(value, Tensor):
            dtype = next((name for kind, name in _SCALARS.items() if isinstance(value, kind)), None)
            if dtype is None:
                raise RegionError(f"{what} is a {type(value).__name__}, which the format does not have.")
            return {"shape": None, "dtype": dtype}
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in DTYPES or value.layout is not torch.strided:
            raise RegionError(f"{what} is {dtype} ({value.layout}), which the format does not have.")
        return {"shape": [self._axis(size) for size in value.shape], "dtype": dtype}

    def _axis(self, size: Any) -> str:
        if isinstance(size, int):
            self.documents[f"n{size}"] = {"type": "const", "value": size}
            return f"n{size}"
        expression = size.node.expr
        if str(expression) not in self._names:
            name = self._names[str(expression)] = f"size_{len(self._names)}"
            self.documents[name] = {"type": "var"}
            self.hints[name] = example_size(size)
            if expression.is_Symbol:
                self._symbols[expression] = type(expression)(name, integer=True)
            else:
                self._constrain(name, str(expression.xreplace(self._symbols)))
        return self._names[str(expression)]

    def _constrain(self, name: str, expression: str) -> None:
        try:
            ast.parse(expression, mode="eval")
        except SyntaxError:
            return  # the variable is free then, and its workload has the value
        self.constraints.append(f"{name} == {expression}")


def _op_type(region: Region) -> str:
    return region.kind.replace(".", "_")


def _input_names(unit: CompileUnit) -> list[str]:
    """Return a name for each operand: that of the pattern's argument, else that of the operand in the body."""
    roles = {number: name for name, number in unit.region.arguments.items()}
    names: list[str] = []
    for number, node in enumerate(unit.region.body.graph.find_nodes(op="placeholder")):
        names.append(roles[number] if number in roles else _free_name(node.name, {*names, *roles.values()}))
    return names


def _free_name(name: Any, taken: Iterable[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _reference(unit: CompileUnit, inputs: list[str], outputs: int) -> str:
    arguments = ", ".join(inputs)
    result = f"_body({arguments})" + ("[0]" if outputs == 1 else "")
    return (
        f"{body_source(unit.region.body)}\n\n_body = Body()\n\n\ndef run({arguments}):\n    return {result}\n"
    )


def _workload(
    name: str, axes: Mapping[str, int], inputs: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """Return a workload, identified by its contents, or None and why there is none."""
    described: dict[str, Any] = {}
    for key, value in inputs.items():
        if not isinstance(value, Tensor):
            described[key] = {"type": "scalar", "value": example_size(value)}
            continue
        if not value.dtype.is_floating_point and value.dtype is not torch.bool:
            return None, f"random integers may be out of range for its operand '{key}'"
        described[key] = {"type": "random"}
    content = json.dumps([name, axes, described], sort_keys=True).encode()
    identity = uuid.UUID(bytes=blake2b(content, digest_size=16).digest())
    return {"uuid": str(identity), "axes": dict(axes), "inputs": described}, ""


def _write(root: Path, part: str, definition: Definition, suffix: str, content: str) -> None:
    path = root / part / definition.op_type / f"{definition.name}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_replace(resolve_target(path)) as written:
        written.write_text(content, encoding="utf-8")
