"""`dovetail.compile`: a model called, trained, saved and moved as before."""

import copy
import pickle
import threading
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import Dim

import dovetail
from dovetail import zoo
from dovetail.lowering.guards import specialization_of
from dovetail.runtime.cuda_graph_replay import CudaGraphReplay
from tests.lowering.helpers import Blocks, Counting, fused


def test_the_work_is_done_at_once_with_examples_and_in_the_first_call_without() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    mine = Counting()
    fast = dovetail.compile(model, (x,), backends=mine)
    assert mine.compiled == ["block_0"]
    late = dovetail.compile(model, backends=mine)
    assert late.graphs == ()
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
        assert torch.equal(late(x), model(x))
    assert [r.kind for r in dovetail.regions(late.graphs[0])] == ["block"] * 4
    assert mine.compiled == ["block_0"]


def test_nothing_is_left_outside_of_regions() -> None:
    entry = zoo.get("llama")
    model, inputs = entry.build().eval(), entry.example_inputs()
    mine = Counting()
    fast = dovetail.compile(model, inputs.args, inputs.kwargs, backends=mine)
    graph = fast.graphs[0]
    assert {n.op for n in graph.graph.nodes} <= {
        "placeholder",
        "get_attr",
        "call_module",
        "call_function",
        "output",
    }
    assert not [n for n in graph.graph.nodes if n.op == "call_function" and "getitem" not in str(n.target)]
    assert len(mine.compiled) == 3  # what is before the layers, a layer, what is after them
    with torch.no_grad():
        assert torch.equal(fast(*inputs.args, **inputs.kwargs), model(*inputs.args, **inputs.kwargs))


def test_it_is_the_same_model() -> None:
    model, x = Blocks(), torch.randn(3, 8)
    fast = dovetail.compile(model, (x,), backends="eager")
    assert list(fast.state_dict()) == list(model.state_dict())
    assert [id(p) for p in fast.parameters()] == [id(p) for p in model.parameters()]
    assert fast.layers is model.layers
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
    fast(x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(fast(x), model(x))
        fast.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
        assert torch.equal(fast(x), model(x))
    assert not fast.eval().training
    assert not model.training


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.norm(x)
        return {"kept": self.drop(x) * scale, "plain": torch.relu(x)}


def test_modes_switch_and_statistics_are_kept() -> None:
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(16, 8)
    twin = copy.deepcopy(model)
    fast = dovetail.compile(model, (x,), backends="eager")
    for _ in range(2):
        torch.manual_seed(1)
        result = fast(x)
        torch.manual_seed(1)
        expected = twin(x)
        assert all(torch.equal(result[k], expected[k]) for k in expected)
    assert torch.equal(model.norm.running_mean, twin.norm.running_mean)
    assert model.norm.num_batches_tracked == 2
    fast.eval()
    twin.eval()
    assert torch.equal(fast(x)["kept"], twin(x)["kept"])
    assert len(fast.graphs) == 2
    fast.train()
    twin.train()
    fast(x)
    twin(x)
    assert len(fast.graphs) == 2
    model.norm.eval()  # one module in another mode is another capture
    twin.norm.eval()
    torch.manual_seed(2)
    result = fast(x)
    torch.manual_seed(2)
    assert torch.equal(result["kept"], twin(x)["kept"])
    assert len(fast.graphs) == 3


def test_other_shapes_are_new_captures_up_to_a_bound() -> None:
    model = Blocks().eval()
    fast = dovetail.compile(model, (torch.randn(3, 8),), backends="eager", recompile_limit=2, dynamic=False)
    for n in (3, 4, 3, 4):
        x = torch.randn(n, 8)
        assert torch.equal(fast(x), model(x))
    assert len(fast.graphs) == 2
    x = torch.randn(5, 8)
    with pytest.warns(UserWarning, match="recompile limit of 2"):
        assert torch.equal(fast(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fast(x), model(x))


def test_dynamic_shapes_are_one_capture() -> None:
    model = Blocks().eval()
    mine = Counting()
    fast = dovetail.compile(
        model, (torch.randn(3, 8),), backends=mine, dynamic_shapes={"x": {0: Dim("n", min=2, max=99)}}
    )
    for n in (3, 9, 50):
        x = torch.randn(n, 8)
        with torch.no_grad():
            assert torch.equal(fast(x), model(x))
    assert len(fast.graphs) == 1
    assert len(mine.compiled) == 1


def test_what_is_replaced_in_the_model_counts() -> None:
    model, x = Noisy().eval(), torch.randn(4, 8)
    fast = dovetail.compile(model, (x,), backends="eager")
    model.norm.running_mean = torch.ones(8)
    assert torch.equal(fast(x)["kept"], model(x)["kept"])
    model.norm.weight = nn.Parameter(torch.full((8,), 3.0))
    assert torch.equal(fast(x)["kept"], model(x)["kept"])
    fast.double()
    x = x.double()
    assert fast(x)["kept"].dtype is torch.float64
    assert torch.equal(fast(x)["kept"], model(x)["kept"])


def test_pickle_and_deepcopy() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    fast = dovetail.compile(model, (x,), backends="eager")
    again = pickle.loads(pickle.dumps(fast))
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
        assert len(again.graphs) == 1  # no second capture
        again.layers[0].weight.zero_()
        assert not torch.equal(again(x), model(x))
        assert [r.backend for r in dovetail.regions(again.graphs[0])] == ["eager"] * 4
        other = copy.deepcopy(fast)
        other.layers[0].weight.zero_()
        assert torch.equal(other(x), again(x))
        assert torch.equal(fast(x), model(x))


def test_threads() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    fast = dovetail.compile(model, backends="eager")
    expected = model(x)
    agreed: list[bool] = []
    threads = [
        threading.Thread(target=lambda: agreed.append(torch.equal(fast(x), expected))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agreed == [True] * 8
    assert len(fast.graphs) == 1


def test_hooks_of_the_model_run_once() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    seen: list[int] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    fast = dovetail.compile(model, (x,), backends="eager")
    assert not seen
    fast(x)
    assert seen == [1]
    model.register_forward_hook(lambda module, args, result: result * 2)
    model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert torch.equal(fast(x), model(x))
    assert torch.equal(dovetail.compile(model, (x,), backends="eager")(x), model(x))


def test_rules_and_pipelines() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    fast = dovetail.compile(model, (x,), backends="eager", rules=dovetail.rules.groups())
    kinds = {r.kind for r in dovetail.regions(fast.graphs[0], nested=True)}
    assert "group" in kinds
    only = dovetail.compile(model, (x,), backends="eager", pipeline=[dovetail.Fuse(dovetail.rules.groups())])
    assert {r.kind for r in dovetail.regions(only.graphs[0])} == {"group"}
    assert torch.equal(only(x), model(x))
    assert torch.equal(fast(x), model(x))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rules": [], "pipeline": []}, "rules` or a `pipeline"),
        ({"pipeline": 3}, "neither a pass nor"),
        ({"backends": "nope"}, "no backend 'nope'"),
        ({"cuda_graphs": "maybe"}, "cuda_graphs"),
        ({"recompile_limit": 0}, "recompile_limit"),
        ({"on_error": "explode"}, "on_error"),
        ({"granularity": "middle"}, "granularity"),
        ({"verify": "yes"}, "verify"),
        ({"cuda_graphs": True, "backends": "eager"}, "nothing of it is on a CUDA device"),
    ],
)
def test_bad_arguments(options: dict[str, object], words: str) -> None:
    with pytest.raises(dovetail.InvalidArgument, match=words):
        dovetail.compile(Blocks().eval(), (torch.randn(3, 8),), **options)  # type: ignore[arg-type]


def test_options_are_checked_before_the_first_call() -> None:
    with pytest.raises(dovetail.InvalidArgument, match="granularity"):
        dovetail.compile(Blocks(), backends="eager", granularity="middle")  # type: ignore[arg-type]


def test_what_needs_gradients_is_not_replayed() -> None:
    model, x = Blocks().eval().requires_grad_(False), torch.randn(3, 8)
    replay = CudaGraphReplay(model.forward, dovetail.capture(model, (x,)))
    assert not replay.needs_gradients([x])
    assert replay.needs_gradients([x.clone().requires_grad_()])  # of an input, though all weights are frozen
    with torch.no_grad():
        assert not replay.needs_gradients([x.clone().requires_grad_()])


class Played:
    """A recording as a GPU would have one: runs the graph on the inputs kept for it, into results kept for it.

    It is put in place by hand, since nothing is recorded on a CPU.
    """

    def __init__(self, replay: CudaGraphReplay, x: torch.Tensor) -> None:
        self.owner, self.times = replay, 0
        leaves, spec = pytree.tree_flatten(((x,), {}))
        replay._static_inputs = [x.clone()]
        replay._spec, replay._specialization = spec, specialization_of(leaves).operands
        replay._outputs = pytree.tree_flatten(replay.run(x))
        replay._recorded_state = replay._weight_state()
        replay._graph = self

    def replay(self) -> None:
        self.times += 1
        self.owner._outputs[0][0].copy_(self.owner.run(*self.owner._static_inputs))


@torch.no_grad()
def test_a_replay_that_was_begun_is_used_or_thrown_away() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    fast = dovetail.compile(model, (x,), backends="eager")
    cache = fast.__dict__["_cache"]
    program = cache._last.program
    replay = CudaGraphReplay(program.forward, program)
    cache._last = cache.captures[0] = replace(cache._last, run=replay)
    played = Played(replay, x)
    other = torch.randn(3, 8)
    first = fast(x)
    assert torch.equal(first, model(x))
    assert torch.equal(fast(other), model(other))
    assert torch.equal(first, model(x))
    assert played.times == 2
    torch.testing.assert_close(fast(x[:2]), model(x[:2]))  # it does not fit, and nothing is begun
    assert played.times == 2
    cache._last = cache.captures[0]
    model.train()
    assert torch.equal(fast(x), model(x))
    assert played.times == 3  # begun, and thrown away
    assert not replay._lock.locked()


class Copies(Counting):
    def prepare(self, site: Any) -> Any:
        run, kept = site.compiled, {i: site.operands[i].clone() for i in site.constants}
        return lambda *operands: run(*[kept.get(i, operand) for i, operand in enumerate(operands)])


@torch.no_grad()
def test_a_replay_of_code_that_copied_a_weight_is_not_used_after_it_was_written() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    program = dovetail.lower(fused(model, x), [Copies()], cache=False)
    program(x)
    replay = CudaGraphReplay(program.forward, program)
    played = Played(replay, x)
    assert torch.equal(replay(x), model(x))
    assert played.times == 1
    model.layers[0].get_parameter("weight").mul_(2)
    assert torch.equal(replay(x), model(x))
    assert played.times == 1


@torch.no_grad()
def test_a_replay_that_draws_is_not_begun() -> None:
    model, x = nn.Dropout(0.5).train(), torch.randn(3, 8)
    replay = CudaGraphReplay(model.forward, dovetail.capture(model, (x,)))
    Played(replay, x)
    assert replay.begin((x,), {}) is None


def test_what_is_no_model() -> None:
    with pytest.raises(dovetail.InvalidArgument, match="takes a module"):
        dovetail.compile(torch.relu)  # type: ignore[arg-type]
    fast = dovetail.compile(Blocks(), backends="eager")
    with pytest.raises(dovetail.InvalidArgument, match="compiled already"):
        dovetail.compile(fast)


def test_a_model_without_operations_is_compiled() -> None:
    x = torch.ones(2)
    fast = dovetail.compile(nn.Identity(), backends="eager", on_error="raise")
    assert torch.equal(fast(x), x)
    assert not dovetail.regions(fast)
