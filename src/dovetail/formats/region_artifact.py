"""Writes one region without its model: a folder for the author of a faster kernel, or a script that runs it."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shutil
import tempfile
import types
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, RegionError
from dovetail.formats import artifact_check_script
from dovetail.formats.exported_program import exported
from dovetail.ir.graph_module import Program, attribute
from dovetail.ir.nodes import SYMBOLIC, example_size, nbytes, symbol_ranges
from dovetail.ir.printer import text
from dovetail.ir.process_state import preserve_rng_state
from dovetail.lowering.compile_unit import CompileUnit, unit_of
from dovetail.lowering.failures import one_line
from dovetail.numerics.sample_inputs import as_non_leaf, random_inputs, storage_span
from dovetail.outlining.inline import inline
from dovetail.outlining.region import Region, results

FORMAT = 1


def write_artifact(region: Region, folder: Path, *, seed: int = 0) -> Path:
    """Write a region as an artifact; see `Region.export`. Raise InvalidArgument for a folder that is not empty."""
    _check_seed(seed)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument(f"'{folder}' exists and is not empty; give a new folder.")
    unit = unit_of(region)
    if unit.obstacle is not None:
        raise RegionError(f"region '{region.name}' cannot be exported: {unit.obstacle}.")
    if unit.effects.host_effect:
        raise RegionError(
            f"region '{region.name}' has effects on the host ({unit.effects.host_effect}): it cannot be run alone."
        )
    inputs, expected, after = _run_body(unit, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary folder first, so that the artifact is complete or absent.
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        torch.export.save(exported(inline(unit.region.body)), scratch / "body.pt2")
        (scratch / "body.txt").write_text(text(unit.region.body), encoding="utf-8")
        torch.save(inputs, scratch / "inputs.pt")
        torch.save({"results": expected, "operands": after}, scratch / "expected.pt")
        identity = json.dumps(_identity(region, unit, seed), indent=2, sort_keys=False)
        (scratch / "region.json").write_text(identity + "\n", encoding="utf-8")
        (scratch / "check.py").write_text(inspect.getsource(artifact_check_script), encoding="utf-8")
        os.chmod(scratch, 0o777 & ~_umask())
        if folder.exists():
            folder.rmdir()
        scratch.rename(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(scratch)
        raise
    return folder


def _check_seed(seed: Any) -> None:
    if not isinstance(seed, int):
        raise InvalidArgument(f"seed {seed!r} is not an int.")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _run_body(unit: CompileUnit, seed: int) -> tuple[list[Any], list[Any], dict[int, Any]]:
    """Return random operands, the body's results for them, and the values of the operands that it writes."""
    inputs = random_inputs(unit.values, seed, unit.domains)
    with preserve_rng_state(), torch.no_grad():
        torch.manual_seed(seed)
        operands = [
            as_non_leaf(value, True) if isinstance(value, Tensor) and i in unit.effects.writes else value
            for i, value in enumerate(random_inputs(unit.values, seed, unit.domains))
        ]
        try:
            values = unit.region.body(*operands)
        except Exception as error:
            raise RegionError(
                f"region '{unit.region.name}' does not accept random operands ({one_line(error)}), so that there is nothing to "
                f"compare with. `region.reproducer` writes a script whose operands you can change."
            ) from error
    return (
        inputs,
        [_copied(v) for v in values],
        {i: _copied(operands[i]) for i in sorted(unit.effects.writes)},
    )


def _copied(value: Any) -> Any:
    return value.detach().clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value


def _identity(region: Region, unit: CompileUnit, seed: int) -> dict[str, Any]:
    roles = {number: name for name, number in region.arguments.items()}
    values = unit.values
    placeholders = [n for n in unit.region.body.graph.nodes if n.op == "placeholder"]
    outputs = [n.meta.get("val") for n in results(unit.region.body)]
    symbols: dict[str, str] = {}
    for value in (*values, *outputs):
        symbols |= symbol_ranges(value)
    return {
        "format": FORMAT,
        "kind": region.kind,
        "version": region.version,
        "attrs": region.attrs,
        "key": region.key,
        "name": region.name,
        "made_of": list(region.nodes),
        "rule": region.rule,
        "effects": list(region.effects),
        "writes": sorted(unit.effects.writes),
        "random": bool(unit.effects.random),
        "operands": [
            {"name": node.name, "argument": roles.get(i), **_describe_value(value)}
            for i, (node, value) in enumerate(zip(placeholders, values, strict=True))
        ],
        "results": [
            {"result": region.results[i] if region.results else None, **_describe_value(value)}
            for i, value in enumerate(outputs)
        ],
        "sizes_that_vary": symbols,
        "seed": seed,
        "dovetail": version("dovetail"),
        "torch": torch.__version__,
    }


def _describe_value(value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {
            "type": type(value).__name__,
            "value": example_size(value) if isinstance(value, torch.SymInt) else value,
        }
    return {
        "type": "Tensor",
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": [_size(n) for n in value.shape],
        "strides": [_size(n) for n in value.stride()],
        "device": str(value.device),
        "requires_grad": value.requires_grad,
    }


def _size(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)


def write_reproducer(region: Region, path: Path, *, seed: int) -> Path:
    """Write a script that builds the region's body and runs it on random inputs of its shapes.

    Needs `meta["val"]` on the operands, as captured graphs have. Symbolic sizes take their hints. Large constants
    inside the body are random too. Raises RegionError if the body calls what no script can import.
    """
    _check_seed(seed)
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


def body_source(body: GraphModule) -> str:
    """Return Python source that needs torch alone and defines a module `Body` which computes what a body does.

    Raises RegionError for a body that holds a large constant, or that calls what torch does not have.
    """
    script = _Script()
    classes = "\n".join(script.body(body, "Body")).rstrip()
    constants = [n for n in body.graph.nodes if n.op == "get_attr"]
    for node in constants:
        value = attribute(body, cast("str", node.target))
        if isinstance(value, torch.Tensor) and not _is_literal(value):
            raise RegionError(f"its constant '{node.name}' is too large for a script.")
    if script.notes:
        raise RegionError(f"it calls an operator of another library ({script.notes[0].split()[-2]}).")
    used = [line for line in sorted(script.imports) if re.search(rf"\b{line.split()[-1]}\b", classes)]
    foreign = [
        line for line in used if not re.match(r"(from|import) (torch|math|operator|_operator)\b", line)
    ]
    if foreign:
        raise RegionError(f"it calls what torch does not have ({foreign[0]}).")
    names = [name for name in ("device", "inf", "nan") if re.search(rf"\b{name}\b", classes)]
    imports = ["import torch", *([f"from torch import {', '.join(names)}"] if names else [])]
    imports += [line for line in used if line != "import torch"]
    return "\n".join([*imports, "", "", classes, ""])


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


def _is_literal(value: torch.Tensor) -> bool:
    return (nbytes(value) or 0) <= 1024 and not value.is_complex()


def _tensor(value: torch.Tensor) -> str:
    if _is_literal(value):
        where = "" if value.device.type == "cpu" else f", device={str(value.device)!r}"
        numbers = value.detach().cpu().tolist()
        return f"torch.tensor({numbers!r}, dtype={value.dtype}{where}).reshape({tuple(value.shape)})"
    return _random(value)
