"""Models of the zoo, captured once in a process: capturing costs more than most questions to the graph."""

from __future__ import annotations

from functools import cache

from torch.fx import GraphModule

import dovetail
from dovetail import zoo
from dovetail.zoo.common import Inputs


@cache
def zoo_graph(name: str, *, training: bool = False) -> GraphModule:
    """The graph of the small model; it is shared, so a test that writes to its state takes a copy of it."""
    inputs = zoo_inputs(name)
    return dovetail.capture(zoo.get(name).build("tiny").train(training), inputs.args, inputs.kwargs)


def zoo_inputs(name: str) -> Inputs:
    return zoo.get(name).example_inputs("tiny")
