"""Plans made by hand for small models, and what tests ask of a compiled one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from dovetail import Backend, Plan, Region
from dovetail.outlining.region import graph_key
from dovetail.passes.pass_manager import Pipeline
from dovetail.runtime.presets import Mode, blocks
from dovetail.tuning.apply_plan import PlanApplication, environment_of
from dovetail.tuning.check_plan import capture_for_plan
from dovetail.tuning.decisions import BlockDecision, BodyDecision, GraphDecision, RegionChoice

X = torch.linspace(-1, 1, 24).reshape(3, 8)


class Layers(nn.Module):
    """Equal layers between an entry and an exit, all of them more than one operation."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin() + 1
        for layer in self.layers:
            x = torch.relu(layer(x)) * 2 + x.cos()
        return x.exp().tanh()


def captured(model: nn.Module) -> GraphModule:
    return capture_for_plan(model, (X,))


def blocks_of(gm: GraphModule) -> list[Region]:
    return dovetail.regions(Pipeline(list(blocks()))(gm))


def block_of(gm: GraphModule) -> Region:
    """The repeated block of a graph."""
    return next(region for region in blocks_of(gm) if region.kind == "block")


def positions(block: Region, *names: str) -> tuple[int, ...]:
    """The positions of operations in a block, by their names without numbers."""
    return tuple(
        i
        for i, node in enumerate(block.body.graph.nodes)
        if node.op == "call_function" and node.name.rstrip("_0123456789") in names
    )


def halves(block: Region) -> BlockDecision:
    """Divide a block of `Layers` into the product with its activation and the rest."""
    return BlockDecision(
        "layer",
        regions=(
            RegionChoice("head", positions(block, "linear", "relu")),
            RegionChoice("tail", positions(block, "mul", "cos", "add")),
        ),
    )


def plan_for(
    model: nn.Module,
    *args: Any,
    decision: GraphDecision | None = None,
    divided: Mapping[str, BlockDecision] | None = None,
    bodies: Mapping[str, BodyDecision] | None = None,
    **kwargs: Any,
) -> Plan:
    """A plan for a call of a model, as if it had been measured here."""
    gm = capture_for_plan(model, args, kwargs)
    mode: Mode = "training" if gm.training else "inference"
    graphs = {} if decision is None else {graph_key(gm): decision}
    return Plan().with_decisions(
        mode, environment_of(gm), graphs=graphs, blocks=divided or {}, bodies=bodies or {}
    )


def application(plan: Plan, model: nn.Module) -> PlanApplication:
    """A plan that is applied to graphs of a model in the mode that it is in."""
    mode: Mode = "training" if model.training else "inference"
    return PlanApplication(plan, mode, environment_of(captured(model)))


class Fake(Backend):
    """Doubles what a body returns, so that a result shows which bodies it ran."""

    name = "fake"
    trains = True

    def supports(self, region: Any) -> Any:
        return True

    def compile(self, region: Any, examples: Sequence[Any]) -> Any:
        return lambda *operands: tuple(2 * result for result in region.body(*operands))


def kinds(compiled: Any) -> list[str]:
    return [region.kind for region in dovetail.regions(compiled)]


def messages(compiled: Any, kind: str) -> list[str]:
    return [event.message for event in compiled.diagnostics if event.kind == kind]
