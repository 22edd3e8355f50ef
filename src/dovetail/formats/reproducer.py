"""Writes one region as a script that needs torch only."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, RegionError
from dovetail.ir.graph_module import Program, attribute
from dovetail.ir.nodes import SYMBOLIC, nbytes
from dovetail.numerics.sample_inputs import storage_span

if TYPE_CHECKING:
    from dovetail.outlining.region import Region


def write(region: Region, path: Path, *, seed: int) -> Path:
    """Write a script that builds the region's body and runs it on random inputs of its shapes.

    Needs `meta["val"]` on the operands, as captured graphs have. Symbolic sizes take their hints. Large constants
    inside the body are random too. Raises RegionError if the body calls what no script can import.
    """
    if not isinstance(seed, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"seed {seed!r} is not an int.")
    if path.is_dir():
        raise InvalidArgument(f"'{path}' is a folder; give the path of the script to be written.")
    script = _Script()
    classes = script.body(region.body, "Body")
    inputs = script.inputs(region.body)
    lines = [
        f"# Region {region.name}: {region.kind} v{region.version} {json.dumps(region.attrs)}",
        f"# Made of {', '.join(region.nodes)}. Body {region.key[:16]}.",
        "",
        *sorted(script.imports),
        *script.notes,
        "",
        f"torch.manual_seed({seed})",
        "",
        "",
        *classes,
        *inputs,
        "",
        'if __name__ == "__main__":',
        "    for value in Body()(*inputs()):",
        "        if isinstance(value, torch.Tensor):",
        "            print(tuple(value.shape), value.dtype, value.flatten()[:8])",
        "        else:",
        "            print(value)",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


class _Script:
    def __init__(self) -> None:
        self.imports = {"import torch", "from torch import device, inf, nan  # noqa: F401"}
        self.notes: list[str] = []
        self._written: set[str] = set()

    def body(self, body: GraphModule, name: str) -> list[str]:
        """Return the lines of a class for the body, after one for each graph it calls."""
        lines: list[str] = []
        setup: list[str] = []
        for node in body.graph.nodes:
            self._note_library(node.target)
            if node.op not in ("get_attr", "call_module"):
                continue
            target = cast("str", node.target)
            value = attribute(body, target)
            if isinstance(value, GraphModule):
                inner = f"{name}_{re.sub(r'[^0-9A-Za-z_]', '_', target)}"
                if inner not in self._written:
                    self._written.add(inner)
                    lines += self.body(value, inner)
                setup.append(f"        self.{target} = {inner}()")
            elif isinstance(value, torch.Tensor):
                setup.append(f"        self.{target} = {_tensor(value)}")
            else:
                raise RegionError(
                    f"the body calls '{target}', a {type(value).__name__}: a reproducer holds operators only. "
                    f"Capture the model with `dovetail.capture`, which leaves no module calls."
                )
        self._import_globals(body)
        code = body.code if isinstance(body, Program) else str(body.code)
        code = re.sub(r"^def (\w+)", "def forward", code.strip(), count=1)
        lines += [f"class {name}(torch.nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [*dict.fromkeys(setup), ""]
        lines += [f"    {line}" if line.strip() else "" for line in code.splitlines()]
        return [*lines, "", ""]

    def _note_library(self, target: Any) -> None:
        if isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims", "prim"):
            note = f"# Load the library that defines {target.name()} here."
            if note not in self.notes:
                self.notes.append(note)

    def _import_globals(self, body: GraphModule) -> None:
        """Add imports for the globals of the generated code."""
        for name, value in body.graph.python_code("self").globals.items():
            if isinstance(value, types.ModuleType):
                self.imports.add(
                    f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
                )
                continue
            module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
            if name in ("device", "inf", "nan", "NoneType") or module in ("builtins", None):
                continue
            if module in ("__main__", "torch._ops") or qualname is None or not qualname.isidentifier():
                if module == "torch._ops":
                    continue
                raise RegionError(
                    f"the body calls '{name}' of {module}, which a script of its own cannot import."
                )
            self.imports.add(f"from {module} import {qualname} as {name}")

    def inputs(self, body: GraphModule) -> list[str]:
        lines = ["def inputs():", "    return ["]
        for node in body.graph.find_nodes(op="placeholder"):
            if "val" not in node.meta:
                raise RegionError(
                    f"operand '{node.name}' has no meta['val']: capture the graph with examples first."
                )
            lines.append(f"        {_sample(node.meta['val'])},  # {node.name}")
        return [*lines, "    ]", ""]


def _sample(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _random(value)
    if isinstance(value, (list, tuple)):
        items = ", ".join(_sample(v) for v in cast("Sequence[Any]", value))
        return f"[{items}]"
    return repr(_number(value)) if isinstance(value, SYMBOLIC) else repr(value)


def _number(value: Any) -> Any:
    hint = value.node.hint if value.node.has_hint() else None
    if hint is None:
        raise RegionError(f"the size {value} depends on data: no example can be generated for it.")
    return hint if isinstance(hint, (bool, int, float)) else int(hint)


def _random(value: torch.Tensor) -> str:
    sizes = tuple(s if type(s) is int else int(_number(s)) for s in value.shape)
    strides = tuple(s if type(s) is int else int(_number(s)) for s in value.stride())
    span = storage_span(sizes, strides)
    where = "" if value.device.type == "cpu" else f", device={str(value.device)!r}"
    if value.dtype == torch.bool:
        code = f"torch.randint(0, 2, ({span},){where}).bool()"
    elif value.is_floating_point() or value.is_complex():
        wide = value.dtype if value.is_complex() else torch.float32
        code = f"torch.randn(({span},), dtype={wide}{where}).to({value.dtype})"
    else:
        # Integers are usually indices: 0 and 1 are almost always in range.
        code = f"torch.randint(0, 2, ({span},), dtype={value.dtype}{where})"
    code = f"{code}.as_strided({sizes}, {strides})"
    return f"{code}.requires_grad_()" if value.requires_grad and value.is_floating_point() else code


def _tensor(value: torch.Tensor) -> str:
    if (nbytes(value) or 0) <= 1024 and not value.is_complex():
        where = "" if value.device.type == "cpu" else f", device={str(value.device)!r}"
        numbers = value.detach().cpu().tolist()
        return f"torch.tensor({numbers!r}, dtype={value.dtype}{where}).reshape({tuple(value.shape)})"
    return _random(value)
