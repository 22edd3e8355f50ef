"""An outlined graph is a plain GraphModule: the ecosystem's tools take it as it is."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.shape_prop import ShapeProp

import dovetail
from dovetail import Request, zoo
from tests.outlining.helpers import trace


@pytest.fixture(scope="module")
def example():
    entry = zoo.get("mlp")
    model, inputs = entry.build("tiny").eval(), entry.example_inputs("tiny")
    gm = dovetail.capture(model, inputs.args, inputs.kwargs)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    requests = [Request(calls[i : i + 3], "three") for i in range(0, len(calls) - 3, 4)]
    return model, inputs.args, lambda: dovetail.outline(gm, requests)


TOOLS = {
    "interpreter": lambda gm, args: Interpreter(gm).run(*args),
    "graph module": lambda gm, args: GraphModule(gm, gm.graph)(*args),
    "make_fx": lambda gm, args: make_fx(gm)(*args)(*args),
    "compile": lambda gm, args: torch.compile(gm, backend="eager", fullgraph=True)(*args),
    "export": lambda gm, args: torch.export.export(gm, args).module()(*args),
    "strict export": lambda gm, args: torch.export.export(gm, args, strict=True).module()(*args),
    "shape propagation": lambda gm, args: ShapeProp(gm).propagate(*args),
    "functional call": lambda gm, args: torch.func.functional_call(gm, dict(gm.named_parameters()), args),
    "capture": lambda gm, args: dovetail.capture(gm, args)(*args),
}


@pytest.mark.parametrize("tool", list(TOOLS))
def test_it_is_taken_as_it_is(example, tool):
    model, args, make = example
    torch.testing.assert_close(TOOLS[tool](make(), args), model(*args))


def test_an_edit_followed_by_recompile_takes_effect(example):
    _, args, make = example
    gm = make()
    before = gm(*args)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        negated = gm.graph.call_function(torch.neg, (output.args[0][0],))
    output.args = ((negated,),)
    gm.recompile()
    assert "neg" in gm.code
    assert torch.equal(gm(*args), -before)
    body = dovetail.regions(gm)[0].body
    assert body.code.count("def forward") == 1


def test_hooks_stay():
    gm = trace(lambda x: x.exp().neg())
    seen = []
    gm.register_forward_hook(lambda module, args, out: seen.append(out))
    new = dovetail.outline(gm, ["exp"], kind="k")
    new(torch.ones(2))
    assert len(seen) == 1
    assert len(copy.deepcopy(new)._forward_hooks) == 1


def test_the_collector_is_left_as_it_was():
    gm = trace(lambda x: x.exp())
    assert gc.isenabled()
    dovetail.outline(gm, ["exp"], kind="k")
    with pytest.raises(dovetail.UnknownNode):
        dovetail.outline(gm, ["zz"], kind="k")
    assert gc.isenabled()
