"""An ExportedProgram of a graph that calls functions and methods instead of operators: torch.export traces it."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx.traceback as traceback
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node

from dovetail.errors import SaveError
from dovetail.graph.module import Program, copy_graph, rebuild
from dovetail.lowering.examples import real_examples

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def retraced(gm: GraphModule, marks: Mapping[str, Any]) -> ExportedProgram:
    """The program that torch.export makes of a graph, run node by node so that marks reach the new nodes."""
    examples: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if value is None:
            raise SaveError(
                "nothing is known of this input: `capture` the graph with example inputs first", node.name
            )
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        if any(isinstance(size, _SYMBOLIC) for size in sizes):
            raise SaveError(
                "this input has sizes that vary, and the graph calls functions that are no operators: `capture` the model",
                node.name,
            )
        examples.append(value)
    traced = rebuild(gm, copy_graph(gm.graph))
    for node in traced.graph.nodes:
        if node.name in marks:
            node.meta["custom"] = {**node.meta.get("custom", {}), **marks[node.name]}
    traced.__dict__["forward"] = _node_by_node(traced)
    try:
        with torch.random.fork_rng(devices=[]):
            program = torch.export.export(traced, tuple(real_examples(examples)), strict=False)
    except Exception as error:
        raise SaveError(
            f"torch.export cannot trace the graph: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    for node in program.graph.nodes:
        name_nothing_like_python(node)
    return program


def _node_by_node(program: Program) -> Callable[..., Any]:
    def forward(*inputs: Any) -> Any:
        with traceback.preserve_node_meta():
            return Interpreter(program).run(*inputs)

    return forward


def name_nothing_like_python(node: Node) -> None:
    """Give defaults in full where an argument is called like a keyword, as `from` is: torch cannot read it back else."""
    target = node.target
    if not isinstance(target, OpOverload) or not any(
        keyword.iskeyword(a.name) for a in target._schema.arguments
    ):
        return
    listed = [a for a in target._schema.arguments if not a.kwarg_only]
    given = dict(zip([a.name for a in listed], node.args, strict=False)) | node.kwargs
    node.args = tuple(given.pop(a.name) if a.name in given else a.default_value for a in listed)
    node.kwargs = given
