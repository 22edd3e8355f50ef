"""Tensors that lowered code fetches at once are those that its graph has at each call."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule
from torch.nn.utils import parametrize

import dovetail
from dovetail import Backend, Region
from dovetail.ir import weight_fetch
from dovetail.ir.weight_fetch import TensorGuard, WeightFetch
from tests.lowering.helpers import Blocks, fused

X = torch.randn(3, 8)


class _Kept(Backend):
    """Runs bodies, and goes into pickles."""

    name = "kept"
    trains = True

    def supports(self, region: Region) -> bool:
        return True

    def compile(self, region: Region, examples: Any) -> Any:
        return region.body


def lowered() -> GraphModule:
    torch.manual_seed(0)
    return dovetail.lower(fused(Blocks().eval(), X), [_Kept()])


def doubled() -> Tensor:
    """What the graph gives with one of its weights doubled, by another that was never called."""
    fresh = lowered()
    with torch.no_grad():
        fresh.get_parameter("layers.1.weight").mul_(2)
    return fresh(X)


def test_the_code_fetches_them_by_one_call() -> None:
    assert lowered().code.count("self.") == 1


def _data(gm: GraphModule) -> None:
    with torch.no_grad():
        gm.get_parameter("layers.1.weight").mul_(2)


def _parameter(gm: GraphModule) -> None:
    layer: Any = gm.get_submodule("layers.1")
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def _module(gm: GraphModule) -> None:
    layers: Any = gm.get_submodule("layers")
    new = copy.deepcopy(layers.get_submodule("1"))
    new.weight = nn.Parameter(new.weight.detach() * 2)
    layers.add_module("1", new)


def _ancestor(gm: GraphModule) -> None:
    new = copy.deepcopy(gm.get_submodule("layers"))
    layer: Any = new.get_submodule("1")
    layer.weight = nn.Parameter(layer.weight.detach() * 2)
    gm.add_module("layers", new)


def _shadowed(gm: GraphModule) -> None:
    layer: Any = gm.get_submodule("layers.1")
    layer.__dict__["weight"] = layer.weight.detach() * 2


def _tensor_attribute(gm: GraphModule) -> None:
    layer: Any = gm.get_submodule("layers.1")
    weight = layer.weight.detach() * 2
    del layer.weight
    layer.weight = weight


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def _parametrized(gm: GraphModule) -> None:
    parametrize.register_parametrization(gm.get_submodule("layers.1"), "weight", _Doubled())


def _of_the_class(gm: GraphModule) -> None:
    layer: Any = gm.get_submodule("layers.1")
    weight = layer.weight.detach() * 2
    layer.__class__ = type("Other", (type(layer),), {"weight": property(lambda _: weight)})
    del layer._parameters["weight"]


CHANGES = [_data, _parameter, _module, _ancestor, _shadowed, _tensor_attribute, _parametrized, _of_the_class]


@pytest.mark.parametrize("calls", [1, 6])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_is_seen(change: Any, calls: int) -> None:
    gm = lowered()
    before = X
    for _ in range(calls):
        before = gm(X)
    change(gm)
    assert torch.equal(gm(X), doubled())
    assert not torch.equal(gm(X), before)
    assert torch.equal(gm(X), doubled())


def test_what_a_property_gives_is_asked_for_every_time() -> None:
    gm = lowered()
    gm(X)
    _parametrized(gm)
    first = gm(X)
    layer: Any = gm.get_submodule("layers.1")
    with torch.no_grad():
        layer.parametrizations.weight.original.zero_()
    assert not torch.equal(gm(X), first)


def test_a_parameter_that_is_not_there_is_reported_as_torch_does() -> None:
    gm = lowered()
    gm(X)
    layer: Any = gm.get_submodule("layers.1")
    weight = layer._parameters.pop("weight")
    with pytest.raises(AttributeError, match="weight"):
        gm(X)
    layer._parameters["weight"] = weight
    gm(X)


def test_stand_ins_of_a_functional_call_are_used_and_forgotten() -> None:
    gm = lowered()
    before = gm(X)
    given = {"layers.1.weight": gm.get_parameter("layers.1.weight").detach() * 2}
    assert torch.equal(functional_call(gm, given, (X,)), doubled())
    assert torch.equal(gm(X), before)


def test_copies_pickles_and_replicas_have_their_own() -> None:
    gm = lowered()
    before = gm(X)
    replica: Any = gm._replicate_for_data_parallel()
    for twin in (copy.copy(gm), copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        assert torch.equal(twin(X), before)
    for twin in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        _data(twin)
        assert torch.equal(twin(X), doubled())
    replica._modules["layers"] = copy.deepcopy(replica._modules["layers"])
    _data(replica)
    assert torch.equal(replica(X), doubled())
    assert torch.equal(gm(X), before)


def test_threads_see_what_was_there() -> None:
    gm, wrong = lowered(), list[bool]()
    expected = gm(X)

    def call() -> None:
        for _ in range(50):
            wrong.append(not torch.equal(gm(X), expected))

    def touch() -> None:
        layer: Any = gm.get_submodule("layers.1")
        for _ in range(200):
            layer.weight = nn.Parameter(layer.weight.detach().clone())

    threads = [threading.Thread(target=work) for work in (call, call, touch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong)


def test_where_python_does_not_count_they_are_fetched_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_fetch, "dict_version", None)
    for change in CHANGES:
        gm = lowered()
        gm(X)
        change(gm)
        assert torch.equal(gm(X), doubled())


def test_fetching_is_paid_once() -> None:
    class Slow(nn.Module):
        looked = 0

        def __getattr__(self, name: str) -> Any:
            Slow.looked += 1
            return super().__getattr__(name)

    root = Slow()
    root.child = Slow()
    root.child.weight = nn.Parameter(torch.ones(1))
    holder = WeightFetch(["child.weight"])
    assert holder(root)[0] is root.child.weight
    Slow.looked = 0
    for _ in range(5):
        holder(root)
    assert Slow.looked == 0


def test_other_tracers_see_through_it() -> None:
    gm = lowered()
    expected = gm(X)
    traced = torch.compile(gm, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(X), expected)
    _data(gm)
    torch.testing.assert_close(traced(X), doubled())


def _module() -> nn.Module:
    root = nn.Module()
    root.first, root.second = nn.Linear(4, 4), nn.Linear(4, 4)
    return root


TARGETS = ["first.weight", "second.weight", "second.bias"]
needs_versions = pytest.mark.skipif(weight_fetch.dict_version is None, reason="dicts have no version here")


def _frozen(root: Any) -> None:
    root.second.weight.requires_grad_(False)


def _transposed(root: Any) -> None:
    root.second.weight.data = root.second.weight.data.t()


def _converted(root: Any) -> None:
    root.second.bias.data = root.second.bias.data.double()


def _replaced(root: Any) -> None:
    root.second.bias = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("change", [_frozen, _transposed, _converted, _replaced])
@pytest.mark.parametrize("has_versions", [pytest.param(True, marks=needs_versions), False])
def test_a_fetch_is_the_same_tuple_while_nothing_about_the_tensors_changes(
    change: Any, has_versions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_versions:
        monkeypatch.setattr(weight_fetch, "dict_version", None)
    root = _module()
    fetch = WeightFetch(TARGETS)
    before = fetch(root)
    with torch.no_grad():
        root.first.weight.mul_(2)  # type: ignore[operator, union-attr]
    root.second.counter = 1  # type: ignore[union-attr]
    for _ in range(4):
        assert fetch(root) is before
    change(root)
    after = fetch(root)
    assert after is not before
    assert after[2] is root.second.bias  # type: ignore[union-attr]
    for _ in range(4):
        assert fetch(root) is after


def test_writes_to_stamped_tensors_give_another_tuple() -> None:
    root: Any = _module()
    fetch = WeightFetch(TARGETS)
    unstamped = fetch(root)
    assert not fetch.stamp([1])
    assert fetch.stamp([1])
    before = fetch(root)
    assert before is not unstamped
    with torch.no_grad():
        root.first.weight.mul_(2)
    assert fetch(root) is before
    with torch.no_grad():
        root.second.weight.mul_(2)
    after = fetch(root)
    assert after is not before
    root.second.weight.data = root.second.weight.data.clone()
    assert fetch(root) is not after


def test_a_guard_that_the_caller_checked_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    root: Any = _module()
    fetch, everything = WeightFetch(TARGETS), TensorGuard(root.parameters())
    part = TensorGuard([root.first.weight])
    fetch(root)
    checked: list[TensorGuard] = []
    is_current = TensorGuard.is_current

    def spied(guard: TensorGuard) -> bool:
        checked.append(guard)
        return is_current(guard)

    monkeypatch.setattr(TensorGuard, "is_current", spied)

    def checks(guard: TensorGuard | None) -> int:
        checked.clear()
        fetch.trust(guard)
        fetch(root)
        return len(checked)

    # The first call relates the guard to what was fetched.
    assert [checks(everything) for _ in range(3)] == [1, 0, 0]
    assert [checks(part) for _ in range(3)] == [1, 1, 1]
    assert [checks(None) for _ in range(2)] == [1, 1]
    assert [checks(everything) for _ in range(2)] == [1, 0]
    # Another one, as after a change, is not the one that was checked then.
    assert [checks(TensorGuard(root.parameters())), checks(everything)] == [1, 1]
    # It holds for one call, on the thread that has checked it.
    fetch.trust(everything)
    checked.clear()
    thread = threading.Thread(target=fetch, args=(root,))
    thread.start()
    thread.join()
    assert len(checked) == 1


def test_a_graph_that_is_called_itself_notices_what_the_compiled_model_has_not_seen() -> None:
    torch.manual_seed(0)
    model = Blocks().eval()
    compiled = dovetail.compile(model, (X,), backends=[_Kept()])
    with torch.no_grad():
        for _ in range(5):
            compiled(X)
    graph = compiled.graphs[0]
    weight = model.get_parameter("layers.1.weight")
    weight.data = weight.data.t()
    torch.testing.assert_close(graph(X), model(X))
    with pytest.raises(dovetail.CallMismatch):
        compiled._captures.captures[0].run(X[:, :3])
    model.requires_grad_(True)
    assert graph(X).requires_grad
    assert compiled(X).requires_grad


def test_a_region_may_come_before_the_first_weight() -> None:
    def forward(x: Tensor) -> Tensor:
        return linear(torch.relu(x + 1) * 2)

    linear = nn.Linear(8, 8)
    gm = dovetail.outline(dovetail.capture(forward, (X,)), ["add", "relu", "mul"], kind="first")
    for program in (dovetail.lower(gm, [_Kept()]), dovetail.lower(gm, ["torchscript"])):
        for _ in range(4):
            torch.testing.assert_close(program(X), forward(X))
