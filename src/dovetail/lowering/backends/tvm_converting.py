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

from dovetail.lowering.backends.common import quiet
from dovetail.lowering.backends.foreign import NoForm
from dovetail.lowering.backends.tvm_loops import loops

INEXACT: Mapping[str, str] = {
    "aten.log1p.default": "TVM takes log(1 + x) for log1p, which is off where x is small",
}
"""Operators whose form in TVM is not what they are."""

_CONVERTING = threading.Lock()


def converted(graph: Graph) -> Any:
    """A Relax module whose function "main" does what a graph does, down to loops; raises NoForm."""
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    with _CONVERTING, quiet():
        try:
            module = from_exported_program(_exported(graph), run_ep_decomposition=False)
            return relax.transform.LegalizeOps(loops())(module)
        except Exception as error:
            raise NoForm(f"TVM does not convert it: {_reason(error)}") from error


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
