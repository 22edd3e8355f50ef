"""Flat graphs as modules of TVM's Relax."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from dovetail.graph.forking import released_by_fork
from dovetail.lowering.backends.common import quiet
from dovetail.lowering.backends.foreign import NoForm, loaded
from dovetail.lowering.backends.tvm_loops import loops

INEXACT: Mapping[str, str] = {
    "aten.log1p.default": "TVM takes log(1 + x) for log1p, which is off where x is small",
}
"""Operators whose form in TVM is not what they are."""

_CONVERTING = released_by_fork(threading.Lock())


def converted(graph: Graph) -> Any:
    """A Relax module whose function "main" does what a graph does, down to loops; raises NoForm."""
    relax = loaded("tvm.relax")
    convert = loaded("tvm.relax.frontend.torch").from_exported_program
    with _CONVERTING, quiet():
        try:
            module = relax.transform.LegalizeOps(loops())(
                convert(_exported(graph), run_ep_decomposition=False)
            )
        except Exception as error:
            raise NoForm(f"TVM does not convert it: {_reason(error)}") from error
    _check_types(module, graph)
    return module


def _check_types(module: Any, graph: Graph) -> None:
    """Whether results are what they must be: of some dtypes the converter makes others."""
    made = list(module["main"].ret_ty.fields)
    for kind, node in zip(made, cast("Sequence[Node]", graph.output_node().args[0]), strict=True):
        value = node.meta["val"]
        got, wanted = str(kind.dtype), str(value.dtype).removeprefix("torch.")
        if got != wanted or [int(n) for n in kind.shape.values] != list(value.shape):
            raise NoForm(f"TVM makes {got} of what is {wanted} ('{node.name}')")


def _exported(graph: Graph) -> ExportedProgram:
    """A graph that is plain already as a program, without tracing it once more."""
    operands = graph.find_nodes(op="placeholder")
    results = cast("Sequence[Node]", graph.output_node().args[0])
    inputs = [InputSpec(InputKind.USER_INPUT, TensorArgument(n.name), None) for n in operands]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in results]
    called = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=pytree.tree_structure(((0,) * len(inputs), {})),
        out_spec=pytree.tree_structure((0,) * len(outputs)),
    )
    return ExportedProgram(
        nn.Module(), graph, ExportGraphSignature(inputs, outputs), {}, {}, [ModuleCallEntry("", called)]
    )


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]
