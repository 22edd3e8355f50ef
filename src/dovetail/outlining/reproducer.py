"""One region as a script that needs torch alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx import GraphModule, Node

from dovetail.errors import RegionError
from dovetail.graph.describe import nbytes
from dovetail.graph.module import Program, attribute

if TYPE_CHECKING:
    from dovetail.outlining.region import Region


def write(region: Region, path: Path, *, seed: int) -> Path:
    """Write a script that builds the region's body and runs it on made-up inputs of its shapes.

    Needs `meta["val"]` on the operands, as captured graphs have. Symbolic sizes take their hints. Constants inside
    the body are made up too, save small ones. Refused if the body calls modules that no text can give.
    """
    lines = [
        f'"""Region {region.name}: {region.kind} v{region.version} {region.attrs or ""}',
        "",
        f"Made of {', '.join(region.nodes)}. Body {region.key[:16]}.",
        '"""',
        "",
        "import torch",
        "from torch import device, inf, nan  # noqa: F401",
        "",
        f"torch.manual_seed({seed})",
        "",
        *_body(region.body, "Body", set()),
        *_inputs(region),
        "",
        'if __name__ == "__main__":',
        "    for value in Body()(*inputs()):",
        '        print(tuple(value.shape), value.dtype, value.flatten()[:8] if hasattr(value, "shape") else value)',
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _body(body: GraphModule, name: str, written: set[str]) -> list[str]:
    """A class for the body, after one for each graph it calls."""
    lines: list[str] = []
    setup: list[str] = []
    for node in body.graph.nodes:
        if node.op not in ("get_attr", "call_module"):
            continue
        target = cast("str", node.target)
        value = attribute(body, target)
        if isinstance(value, GraphModule):
            inner = f"{name}_{re.sub(r'[^0-9A-Za-z_]', '_', target)}"
            if inner not in written:
                written.add(inner)
                lines += _body(value, inner, written)
            setup.append(f"        self.{target} = {inner}()")
        elif isinstance(value, torch.Tensor):
            setup.append(f"        self.{target} = {_tensor(value)}")
        else:
            raise RegionError(
                f"the body calls '{target}', a {type(value).__name__}: a reproducer holds operators only. "
                f"Capture the model with `dovetail.capture`, which leaves no module calls."
            )
    code = body.code if isinstance(body, Program) else str(body.code)
    code = re.sub(r"^def (\w+)", "def forward", code.strip(), count=1)
    lines += [
        f"class {name}(torch.nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *dict.fromkeys(setup),
        "",
    ]
    lines += [f"    {line}" if line.strip() else "" for line in code.splitlines()]
    return [*lines, "", ""]


def _inputs(region: Region) -> list[str]:
    lines = ["def inputs():", "    return ["]
    for node in region.body.graph.find_nodes(op="placeholder"):
        lines.append(f"        {_made_up(node)},  # {node.name}")
    return [*lines, "    ]", ""]


def _made_up(node: Node) -> str:
    if "val" not in node.meta:
        raise RegionError(
            f"operand '{node.name}' has no meta['val']: capture the graph with example inputs first."
        )
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return _random(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return repr(_number(value))
    return repr(value)


def _number(value: Any) -> Any:
    hint = value.node.hint if value.node.has_hint() else None
    if hint is None:
        raise RegionError(f"the size {value} depends on data: no example can be made up for it.")
    return hint if not hasattr(hint, "is_integer") or isinstance(hint, (bool, int, float)) else int(hint)


def _random(value: torch.Tensor) -> str:
    sizes = tuple(s if type(s) is int else int(_number(s)) for s in value.shape)
    strides = tuple(s if type(s) is int else int(_number(s)) for s in value.stride())
    span = 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
    where = "" if value.device.type == "cpu" else f", device={str(value.device)!r}"
    if value.dtype == torch.bool:
        made = f"torch.randint(0, 2, ({span},){where}).bool()"
    elif value.is_floating_point() or value.is_complex():
        wide = value.dtype if value.is_complex() else torch.float32
        made = f"torch.randn(({span},), dtype={wide}{where}).to({value.dtype})"
    else:
        # Indices are the usual integers: 0 and 1 are in range of almost anything they may index.
        made = f"torch.randint(0, 2, ({span},), dtype={value.dtype}{where})"
    made = f"{made}.as_strided({sizes}, {strides})"
    return f"{made}.requires_grad_()" if value.requires_grad and value.is_floating_point() else made


def _tensor(value: torch.Tensor) -> str:
    if (nbytes(value) or 0) <= 1024 and not value.is_complex():
        where = "" if value.device.type == "cpu" else f", device={str(value.device)!r}"
        return f"torch.tensor({value.detach().cpu().tolist()!r}, dtype={value.dtype}{where}).reshape({tuple(value.shape)})"
    return _random(value)
