"""Which region goes where, and what a lowered graph still is."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import dovetail
from dovetail.zoo.common import RMSNorm
from tests.lowering.helpers import Blocks, Counting, events, fused


def test_equal_layers_are_compiled_once() -> None:
    torch.manual_seed(0)
    model, x = Blocks().eval(), torch.randn(3, 8)
    gm = fused(model, x)
    before = dovetail.text(gm)
    mine = Counting()
    lowered = dovetail.lower(gm, [mine])
    assert mine.compiled == ["block_0"]
    with torch.no_grad():
        assert torch.equal(lowered(x), model(x))
    assert mine.calls == 6  # four layers, and two in the trial
    assert [r.backend for r in dovetail.regions(lowered)] == ["counting"] * 4
    assert [r.backend for r in dovetail.regions(gm)] == [None] * 4
    assert dovetail.text(gm) == before


def test_a_second_graph_with_equal_bodies_compiles_nothing() -> None:
    x = torch.randn(3, 8)
    mine = Counting()
    first = dovetail.lower(fused(Blocks().eval(), x), [mine])
    second = dovetail.lower(fused(Blocks(depth=6).eval(), x), [mine])
    assert mine.compiled == ["block_0"]
    with torch.no_grad():
        first(x)
        second(x)
    assert mine.compiled == ["block_0"]


def test_an_empty_list_takes_everything_back() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    mine = Counting()
    lowered = dovetail.lower(fused(model, x), [mine])
    back = dovetail.lower(lowered, [])
    mine.calls = 0
    assert torch.equal(back(x), model(x))
    assert mine.calls == 0
    assert {r.backend for r in dovetail.regions(back)} == {None}
    assert dovetail.text(dovetail.inline(lowered)) == dovetail.text(dovetail.capture(model, (x,)))


def test_preference_by_order_kind_and_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.other = RMSNorm(8, 1e-6), RMSNorm(8, 1e-6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.norm(x)) * 3 + self.other(x)

    x = torch.randn(2, 8)
    gm = fused(Two().eval(), x, rules=dovetail.rules.DEFAULT)
    kinds = [r.kind for r in dovetail.regions(gm)]
    assert kinds.count("rms_norm") == 2
    assert "group" in kinds
    norms = Counting("norms", lambda r: r.kind == "rms_norm")
    rest = Counting("rest")
    by_order = dovetail.lower(gm, [norms, rest])
    assert {r.kind: r.backend for r in dovetail.regions(by_order)} == {"rms_norm": "norms", "group": "rest"}
    by_kind = dovetail.lower(gm, {"group": norms, "rms_norm": rest})
    assert {r.kind: r.backend for r in dovetail.regions(by_kind)} == {"rms_norm": "rest", "group": None}
    assert "does not take group" in next(e.reason for e in events(by_kind) if e.backend == "norms")
    by_name = dovetail.lower(gm, {"rms_norm_1": rest})
    assert [r.backend for r in dovetail.regions(by_name) if r.kind == "rms_norm"] == [None, "rest"]
    keyed = dovetail.regions(gm, kind="group")[0].key
    planned = dovetail.lower(gm, norms, plan={keyed: rest, "a body of another graph": "inductor"})
    assert {r.kind: r.backend for r in dovetail.regions(planned)} == {"rms_norm": "norms", "group": "rest"}
    for graph in (by_order, by_kind, by_name, planned):
        assert torch.equal(graph(x), gm(x))


def test_outer_or_inner() -> None:
    x = torch.randn(3, 8)

    @dovetail.rule(kind="act")
    def act(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    gm = dovetail.fuse(fused(Blocks().eval(), x, rules=act), dovetail.rules.repeats(min_size=2))
    assert [r.kind for r in dovetail.regions(gm)] == ["block"] * 4
    whole = Counting("whole")
    outer = dovetail.lower(gm, [whole])
    names = [r.name for r in dovetail.regions(outer, nested=True) if r.backend == "whole"]
    assert names
    assert not any("/" in name for name in names)
    inner = dovetail.lower(gm, [Counting("parts")], granularity="inner")
    named = [r.name for r in dovetail.regions(inner, nested=True) if r.backend == "parts"]
    assert named
    assert all("/" in name for name in named)
    # Who is asked first gets what is inside; the one after it cannot have the whole any more.
    mixed = dovetail.lower(gm, [Counting("acts", lambda r: r.kind == "act"), whole])
    backends = {r.name.count("/"): r.backend for r in dovetail.regions(mixed, nested=True)}
    assert backends == {0: None, 1: "acts"}
    for graph in (outer, inner, mixed):
        assert torch.equal(graph(x), gm(x))


def test_a_region_too_small_is_left_alone() -> None:
    gm = dovetail.capture(nn.Sequential(nn.ReLU(), nn.Sigmoid()), (torch.randn(3),))
    gm = dovetail.outline(gm, ["relu"], kind="alone")
    lowered = dovetail.lower(gm, [Counting()])
    assert dovetail.regions(lowered)[0].backend is None
    assert "below 2" in events(lowered)[0].reason
    assert dovetail.regions(dovetail.lower(gm, [Counting()], smallest=1))[0].backend == "counting"


def test_constants_of_the_model_are_operands() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x * torch.tensor([1.0, 2.0, 3.0])) + 1

    model, x = Scaled(), torch.randn(2, 3)
    gm = dovetail.capture(model, (x,))
    every = [n for n in gm.graph.nodes if n.op in ("call_function", "get_attr")]
    gm = dovetail.outline(gm, every, kind="all")
    mine = Counting()
    lowered = dovetail.lower(gm, [mine])
    assert torch.equal(lowered(x), model(x))
    assert mine.calls == 3


def test_passes_copies_and_pickles_keep_it() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    lowered = dovetail.lower(fused(model, x), ["eager"])
    with torch.no_grad():
        expected = lowered(x)
        for again in (copy.deepcopy(lowered), pickle.loads(pickle.dumps(lowered)), copy.copy(lowered)):
            assert [r.backend for r in dovetail.regions(again)] == ["eager"] * 4
            assert torch.equal(again(x), expected)
    opened = dovetail.inline(lowered, "block_1")
    assert [r.backend for r in dovetail.regions(opened)] == ["eager"] * 3
    assert torch.equal(opened(x), expected)
    pipeline = dovetail.Pipeline(
        [dovetail.Fuse(dovetail.rules.repeats()), dovetail.Lower("eager"), dovetail.Cleanup()]
    )
    piped = pipeline(dovetail.capture(model, (x,)))
    assert [r.backend for r in dovetail.regions(piped)] == ["eager"] * 4
    assert torch.equal(piped(x), expected)


def test_a_profiler_distinguishes_layers() -> None:
    x = torch.randn(3, 8)
    lowered = dovetail.lower(fused(Blocks().eval(), x), ["eager"])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        lowered(x)
    ranges = {event.key for event in profile.key_averages()}
    assert {f"dovetail::block block_{i}" for i in range(4)} <= ranges


def test_another_tracer_sees_the_operations() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(3, 8)
    lowered = dovetail.lower(fused(Blocks().eval(), x), [Counting()])
    traced = make_fx(lowered)(x)
    assert any(n.target is torch.ops.aten.relu.default for n in traced.graph.nodes)


@pytest.mark.parametrize(
    ("backends", "options", "words"),
    [
        ("inducktor", {}, "Did you mean 'inductor'"),
        (["nonsense"], {}, "There are"),
        (3, {}, "is not a backend"),
        ([object()], {}, "is not a backend"),
        (["eager", "eager"], {}, "two backends are named 'eager'"),
        ({"no_such_kind": "eager"}, {}, "Kinds here: block"),
        ("eager", {"on_error": "explode"}, "on_error"),
        ("eager", {"granularity": "middle"}, "granularity"),
        ("eager", {"smallest": 0}, "smallest"),
        ("eager", {"recompile_limit": 0}, "recompile_limit"),
        ("eager", {"timeout": -1}, "timeout"),
        ("eager", {"cache": 3}, "cache"),
        ("eager", {"plan": "fast"}, "plan"),
        ("eager", {"verify": "yes"}, "verify"),
        ("eager", {"grad": "yes"}, "grad"),
        ("eager", {"progress": 3}, "progress"),
    ],
)
def test_bad_arguments_are_reported(backends: object, options: dict[str, object], words: str) -> None:
    gm = fused(Blocks().eval(), torch.randn(3, 8))
    before = dovetail.text(gm)
    with pytest.raises(dovetail.InvalidArgument, match=words):
        dovetail.lower(gm, backends, **options)  # type: ignore[arg-type]
    assert dovetail.text(gm) == before


class Held(nn.Module):
    """Two equal pieces of work with constants of their own, which are no operands of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.randn(4), torch.randn(4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x + self.a) * 2, torch.relu(x + self.b) * 2


def test_equal_bodies_with_constants_of_their_own() -> None:
    model, x = Held(), torch.randn(3, 4)
    gm = dovetail.capture(model, (x,))
    for names in (("a", "add", "relu", "mul"), ("b", "add_1", "relu_1", "mul_1")):
        gm = dovetail.outline(gm, [n for n in gm.graph.nodes if n.name in names], kind="work")
    mine = Counting()
    lowered = dovetail.lower(gm, [mine])
    assert mine.compiled == ["work_0"]
    assert all(torch.equal(a, b) for a, b in zip(lowered(x), model(x), strict=True))


class Referenced(Counting):
    """Keeps weak references to the code that it compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.code: list[weakref.ref[Any]] = []

    def compile(self, region: dovetail.Region, examples: Sequence[Any]) -> Callable[..., Any]:
        run = super().compile(region, examples)
        self.code.append(weakref.ref(run))
        return run


@pytest.mark.parametrize("backend", ["torchscript", Referenced()], ids=["torchscript", "own"])
def test_nothing_is_kept_of_graphs_that_are_gone(backend: Any) -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    lowered = dovetail.lower(fused(model, x), [backend, "eager"], cache=False)
    lowered(x)
    kept: list[weakref.ref[Any]] = [
        weakref.ref(model.layers[0].weight),
        weakref.ref(lowered),
        weakref.ref(dovetail.regions(lowered)[0].body),
    ]
    if isinstance(backend, Referenced):
        assert backend.code
        kept += backend.code
    del model, lowered
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


class Shifted(nn.Module):
    def __init__(self, *, asserts: bool) -> None:
        super().__init__()
        self.c, self.asserts = torch.randn(4), asserts

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.c
        if self.asserts:
            torch._assert_async(x.sum() < 1e9)
        return y * self.c


@pytest.mark.parametrize("asserts", [False, True])
def test_a_constant_inside_and_outside_of_a_nested_region(asserts: bool) -> None:
    model, x = Shifted(asserts=asserts), torch.randn(3, 4)
    checks = ["sum_1", "lt", "_assert_async"] if asserts else []
    gm = dovetail.outline(dovetail.capture(model, (x,)), ["c", "add"], kind="inner")
    gm = dovetail.outline(gm, ["inner_0", *checks, "mul"], kind="outer")
    lowered = dovetail.lower(gm, "eager", cache=False, smallest=1)
    assert torch.equal(lowered(x), model(x))
    assert [r.backend for r in dovetail.regions(lowered)] == ["eager"]


def test_an_operator_named_like_one_of_atens_has_a_value() -> None:
    with torch.library._scoped_library("dovetail_named", "DEF") as library:
        library.define("copy_(Tensor(a!) x, Tensor y) -> Tensor(a!)")
        library.impl("copy_", lambda x, y: x.add_(y), "CompositeExplicitAutograd")
        graph = Graph()
        a, b = graph.placeholder("a"), graph.placeholder("b")
        total = graph.call_function(torch.ops.aten.add.Tensor, (a, 1))
        written = graph.call_function(torch.ops.dovetail_named.copy_.default, (total, b))
        graph.output((graph.call_function(torch.ops.aten.relu.default, (written,), name="relu"),))
        x = torch.randn(3, 4)
        gm = dovetail.capture(GraphModule(nn.Module(), graph), (x, x))
        lowered = dovetail.lower(dovetail.outline(gm, ["relu"], kind="k"), "eager", cache=False, smallest=1)
        assert [r.backend for r in dovetail.regions(lowered)] == ["eager"]
        assert torch.equal(lowered(x, x)[0], torch.relu(x + 1 + x))
