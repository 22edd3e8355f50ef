"""Whether `compile` divides a model into repeated blocks or compiles it whole, by the backend's cost of compiling."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail import Backend, Decline, InvalidArgument, Region
from dovetail.lowering.backend_protocol import Answer, CompileCost, Compiled
from dovetail.runtime.presets import blocks, whole_graph


class Costly(Backend):
    """Runs bodies, and says what compiling costs."""

    name = "costly"
    trains = True

    def __init__(self, cost: CompileCost | None, most: int = 10**6) -> None:
        self.compile_cost, self.most = cost, most

    def supports(self, region: Region) -> Answer:
        size = len(region.body.graph.nodes)
        return True if size <= self.most else Decline(f"{size} nodes are too many")

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        return region.body


class Layers(nn.Module):
    """Stages of equal layers, of another width in every stage."""

    def __init__(self, stages: int, layers: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        for stage in range(stages):
            width = 4 * (stage + 1)
            self.stages.append(nn.Linear(width - 4, width) if stage else nn.Linear(4, 4))
            self.stages.extend(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.stages:
            x = torch.tanh(torch.relu(layer(x)) + 1)
        return x


def compiled(model: nn.Module, backend: Backend, **options: Any) -> Any:
    x = torch.randn(2, 4)
    module = dovetail.compile(model.eval(), (x,), backends=backend, cache=False, **options)
    with torch.no_grad():
        assert torch.equal(module(x), model(x))
    return module


def kinds(module: Any) -> set[str]:
    return {region.kind for region in dovetail.regions(module.graphs[0])}


def reasons(module: Any) -> list[tuple[str, str]]:
    return [
        (d.rule, d.reason) for d in dovetail.explain(module.graphs[0]).declined if "estimated" in d.reason
    ]


def test_many_equal_layers_are_one_body() -> None:
    module = compiled(Layers(2, 12), Costly(CompileCost(per_body=3, per_operation=1)))
    assert "whole" not in kinds(module)
    assert 1 < len({region.key for region in dovetail.regions(module.graphs[0])}) < 5
    ((rule, reason),) = reasons(module)
    assert rule == "whole"
    assert "distinct bodies with" in reason
    assert "the whole graph with 104 in 107.0 s" in reason


def test_mostly_distinct_work_is_one_region() -> None:
    module = compiled(Layers(4, 2), Costly(CompileCost(per_body=20, per_operation=1)))
    assert kinds(module) == {"whole"}
    ((rule, reason),) = reasons(module)
    assert rule == "repeats"
    assert "the whole graph with 48 in 68.0 s" in reason


@pytest.mark.parametrize("passes", [blocks(), (whole_graph(),)], ids=["blocks", "whole"])
def test_a_pipeline_overrides_the_choice(passes: tuple[Any, ...]) -> None:
    cost = CompileCost(per_body=20, per_operation=1)
    module = compiled(Layers(4, 2), Costly(cost), pipeline=list(passes))
    assert ("whole" in kinds(module)) == (len(passes) == 1)


def test_without_a_cost_blocks_are_regions() -> None:
    assert "whole" not in kinds(compiled(Layers(4, 2), Costly(None)))


def test_what_the_backend_does_not_take_whole_is_divided() -> None:
    module = compiled(Layers(4, 2), Costly(CompileCost(per_body=20, per_operation=1), most=30))
    assert "whole" not in kinds(module)
    refused = [d.reason for d in dovetail.explain(module.graphs[0]).declined if d.rule == "whole"]
    assert refused == ["'costly' does not take the whole graph"]


def test_a_graph_without_repeated_blocks_is_not_estimated() -> None:
    module = compiled(Layers(1, 0), Costly(CompileCost(per_body=20, per_operation=1)))
    assert reasons(module) == []


def test_a_cost_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'costly': compile_cost 5; give a CompileCost or None"):
        dovetail.compile(Layers(1, 0), backends=Costly(5))  # type: ignore[arg-type]


def test_the_default_backend_has_a_cost() -> None:
    from dovetail.backends.inductor import Inductor

    cost = Inductor().compile_cost
    assert cost is not None
    assert cost.seconds(1, 100) < cost.seconds(2, 100) < cost.seconds(2, 200)


def test_without_inductor_its_compiler_is_not_imported() -> None:
    program = """
import sys, torch, dovetail
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)).eval()
x = torch.randn(2, 8)
compiled = dovetail.compile(model, (x,), backends="torchscript", cache=False)
compiled(x)
# torch.export itself imports other parts of the package.
print([name for name in ("compile_fx", "graph", "lowering", "scheduler") if f"torch._inductor.{name}" in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
