"""A region for each call of a module, whichever tracer made the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

import dovetail
from dovetail import CyclicRegion, InvalidArgument
from dovetail.errors import RuleError
from dovetail.ir.module_paths import matches_path, normalize_path
from dovetail.rules.by_module import Modules, modules
from tests.rules.repeat_helpers import applied, bodies, member_names, proposed, requests, same_run, to_the_end
from tests.zoo_graphs import zoo_graph, zoo_inputs


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inner(x).chunk(2, dim=-1)
        return a * torch.sigmoid(b)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    """Two layers, and a gate that is called before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.shared = Gate()

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        for layer in self.layers:
            x = layer(x)
        return self.shared(x)


def dynamo(model: nn.Module, *args: Any) -> GraphModule:
    seen: list[GraphModule] = []

    def backend(gm: GraphModule, examples: Any) -> Any:
        seen.append(gm)
        return gm

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(*args)
    return seen[0]


TRACERS: dict[str, Callable[..., GraphModule]] = {
    "capture": lambda model, x: dovetail.capture(model, (x,)),
    "export": lambda model, x: torch.export.export(model, (x,)).graph_module,
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).graph_module,
    "dynamo": dynamo,
    "symbolic_trace": lambda model, x: symbolic_trace(model),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("what", ["layers.*.mlp", "**.mlp", "*.[01].m?p"])
def test_a_path_names_one_module_of_each_layer(tracer: str, what: str) -> None:
    gm = TRACERS[tracer](Model(), torch.randn(2, 4))
    context, candidates, refused = proposed(modules(what, kind="mlp"), gm)
    assert len(candidates) == 2
    assert not refused
    first, second = member_names(context, candidates)
    assert len(first) == len(second) == 6  # linear, chunk, its two parts, sigmoid, mul
    assert not set(first) & set(second)


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize(
    "what", [Gate, "Gate", f"{Gate.__module__}.Gate"], ids=["class", "bare", "qualified"]
)
def test_a_class_names_every_call_of_its_modules(tracer: str, what: Any) -> None:
    gm = TRACERS[tracer](Model(), torch.randn(2, 4))
    context, candidates, refused = proposed(modules(what, kind="gate"), gm)
    # The shared one is called twice: two regions, one before and one after the layers.
    assert len(candidates) == 4
    assert not refused
    assert len({name for names in member_names(context, candidates) for name in names}) == 4 * 6


def test_equal_modules_share_one_body_and_values_stay() -> None:
    model, x = Model(), torch.randn(2, 4)
    gm = dovetail.capture(model, (x,))
    rule = modules(Gate, kind="gate")
    out = applied(rule, gm)
    assert len(dovetail.regions(out, kind="gate")) == 4
    assert bodies(out) == 1
    assert same_run(gm, out, x)
    # Nothing is left that the rule would take.
    assert applied(rule, out) is out


def test_parameters_are_operands() -> None:
    gm = dovetail.capture(Model(), (torch.randn(2, 4),))
    context, candidates, _ = proposed(modules("layers.0", kind="layer"), gm)
    assert all(context.nodes[i].op == "call_function" for i in candidates[0].members)
    region = dovetail.regions(applied(modules("layers.0", kind="layer"), gm))[0]
    assert len(region.inputs) == 1 + 4


def test_of_nested_matches_the_outermost_is_proposed() -> None:
    gm = dovetail.capture(Model(), (torch.randn(2, 4),))
    _, candidates, _ = proposed(modules(["layers.*", "**.mlp", Gate], kind="part"), gm)
    sizes = sorted(len(c.members) for c in candidates)
    assert sizes == [6, 6, 8, 8]  # the shared gate twice, and two whole layers
    assert bodies(applied(modules(["layers.*", Gate], kind="part"), gm)) == 2


def test_nested_matches_become_regions_from_the_inside_if_asked() -> None:
    model, x = Model(), torch.randn(2, 4)
    gm = dovetail.capture(model, (x,))
    rule = modules(["layers.*", Gate, nn.Linear], kind="part", nests=True)
    _, candidates, _ = proposed(rule, gm)
    assert sorted(c.priority for c in candidates) == [-2] * 2 + [-1] * 4 + [0] * 4
    out = to_the_end(rule, gm)
    names = [r.name for r in dovetail.regions(out, nested=True)]
    assert len(dovetail.regions(out)) == 4
    assert len(names) == 4 + 4 + 2  # linears, gates, layers
    assert max(name.count("/") for name in names) == 2
    assert bodies(out) == 2
    assert same_run(gm, out, x)


def test_regions_of_another_kind_are_taken_in() -> None:
    gm = dovetail.capture(Model(), (torch.randn(2, 4),))
    gm = applied(modules(nn.Linear, kind="linear"), gm)
    out = applied(modules(Gate, kind="gate"), gm)
    assert len(dovetail.regions(out, kind="gate")) == 4
    assert len(dovetail.regions(out, kind="linear", nested=True)) == 4


def test_a_path_that_matches_nothing_is_refused_with_what_comes_near() -> None:
    gm = dovetail.capture(Model(), (torch.randn(2, 4),))
    _, candidates, refused = proposed(modules("layer.*.mlp", kind="mlp"), gm)
    assert not candidates
    (refusal,) = refused
    assert refusal.members == ()
    assert "'layer.*.mlp'" in refusal.reason
    assert "layers.*.mlp" in refusal.reason
    _, _, (refusal,) = proposed(modules("Gates", kind="gate"), gm)
    assert "Gate" in refusal.reason.partition(";")[2]


def test_only_what_is_missing_of_many_is_reported() -> None:
    gm = dovetail.capture(Model(), (torch.randn(2, 4),))
    _, candidates, (refusal,) = proposed(modules(["layers.*", "nowhere"], kind="layer"), gm)
    assert len(candidates) == 2
    assert "'nowhere'" in refusal.reason
    assert "'layers.*'" not in refusal.reason


def test_a_graph_that_does_not_say_where_its_operations_came_from() -> None:
    gm = symbolic_trace(lambda x: torch.relu(x) + 1)
    _, candidates, (refusal,) = proposed(modules("layers.*", kind="layer"), gm)
    assert not candidates
    assert "does not record" in refusal.reason


def test_a_module_with_an_operation_that_may_not_be_taken_is_refused() -> None:
    gm = dovetail.capture(Model(), (torch.randn(2, 4),))
    rule = modules("layers.*", kind="layer")
    _, candidates, _ = proposed(rule, gm)
    excluded = candidates[0].members[0]
    _, left, (refusal,) = proposed(rule, gm, barred={excluded: "asked never to"})
    assert [c.members for c in left] == [candidates[1].members]
    assert refusal.at == excluded
    assert "asked never to" in refusal.reason
    assert "layers.0" in refusal.reason


def written_by_hand(cross: bool) -> GraphModule:
    """sin and cos of one module, and between them an operation of the caller."""
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.sin, (x,))
    between = graph.call_function(torch.neg, (first if cross else x,))
    last = graph.call_function(torch.add, (first, between))
    graph.output(last)
    for node in (first, last):
        node.meta["nn_module_stack"] = {"1": ("L['self'].part", nn.Identity)}
    return GraphModule(nn.Module(), graph)


def test_whether_a_module_can_be_one_region_is_for_the_choice_to_say() -> None:
    rule = modules("part", kind="part")
    context, candidates, _ = proposed(rule, written_by_hand(cross=True))
    with pytest.raises(CyclicRegion, match="neg"):
        dovetail.outline(context.gm, requests(context, candidates))
    assert len(dovetail.regions(applied(rule, written_by_hand(cross=False)))) == 1


def test_small_modules_can_be_left_alone() -> None:
    gm = dovetail.capture(Model(), (torch.randn(2, 4),))
    assert len(proposed(modules(nn.Linear, kind="linear"), gm)[1]) == 4
    assert not proposed(modules(nn.Linear, kind="linear", min_size=2), gm)[1]


def test_why_two_operations_are_not_in_one_region() -> None:
    gm = dovetail.capture(Model(), (torch.randn(2, 4),))
    rule = modules("layers.*", kind="layer")
    context, (first, second), _ = proposed(rule, gm)
    a, b = first.members[0], second.members[0]
    assert "layers.0 and layers.1" in rule.why_not(context, a, b)[0]
    assert rule.why_not(context, a, first.members[-1]) == []
    outside = next(i for i, n in enumerate(context.nodes) if n.op == "call_function")
    assert "no module that matches" in rule.why_not(context, outside, a)[0]


@pytest.mark.parametrize("name", ["llama", "bert", "moe", "mamba", "vit"])
def test_layers_of_the_zoo(name: str) -> None:
    gm, inputs = zoo_graph(name), zoo_inputs(name)
    out = applied(modules("layers.*", kind="layer"), gm)
    assert len(dovetail.regions(out, kind="layer")) == 2
    assert bodies(out) == 1
    assert same_run(gm, out, *inputs.args, **inputs.kwargs)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", ""),
        ("layers.0.mlp", "layers.0.mlp"),
        ("L['self'].layers.0", "layers.0"),
        ("L['self']", ""),
        ("G['model'].layers['0'].mlp", "layers.0.mlp"),
        ("getattr(L['self'].layers, '0')", "layers.0"),
        ("getattr(getattr(L['self'].layers, '0').parts, '1').mlp", "layers.0.parts.1.mlp"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['fn'].__closure__[0].cell_contents.layers.0", "layers.0"),
        ("shared@1.inner@2", "shared.inner"),
    ],
)
def test_paths_in_one_form(text: str, path: str) -> None:
    assert normalize_path(text) == path


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("layers.*", "layers.0", True),
        ("layers.*", "layers.0.mlp", False),
        ("layers.**", "layers.0.mlp", True),
        ("**.mlp", "mlp", True),
        ("**.mlp", "a.b.mlp", True),
        ("**.mlp", "a.mlp.b", False),
        ("a.**.b.**.c", "a.x.b.y.b.c", True),
        ("a.**.b.**.c", "a.x.c", False),
        ("layers.[0-3]", "layers.4", False),
        ("Layers.*", "layers.0", False),
    ],
)
def test_path_patterns(pattern: str, path: str, fits: bool) -> None:
    assert matches_path(pattern, path) is fits


def test_rules_are_values() -> None:
    rule = modules([Gate, "layers.*"], kind="gate", priority=3)
    assert rule == modules([f"{Gate.__module__}.Gate", "layers.*"], kind="gate", priority=3)
    assert isinstance(rule, Modules)
    assert (rule.name, rule.priority, rule.nests) == ("gate", 3, False)


@pytest.mark.parametrize(
    ("what", "options", "words"),
    [
        ([], {}, "neither a path nor a class"),
        ("", {}, "neither a path nor a class"),
        ([3], {}, "neither a path nor a class"),
        ("a", {"priority": "high"}, "priority"),
        ("a", {"min_size": 0}, "min_size"),
        ("a", {"escapes": "sometimes"}, "escapes"),
    ],
)
def test_bad_arguments(what: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RuleError, match=words):
        modules(what, kind="gate", **options)


def test_a_bad_kind() -> None:
    with pytest.raises(InvalidArgument, match="kind"):
        modules("a", kind="not a kind")


def test_a_part_goes_with_its_operation() -> None:
    gm = dovetail.capture(Model(), (torch.randn(2, 4),))
    context, candidates, _ = proposed(modules("shared", kind="gate"), gm)
    for candidate in candidates:
        parts = [i for i in candidate.members if context.nodes[i].target is operator.getitem]
        assert len(parts) == 2


def test_what_is_neither_a_path_nor_a_class_is_refused() -> None:
    with pytest.raises(dovetail.RuleError, match="rule 'k': 3 is neither a path nor a class"):
        dovetail.rules.modules(3, kind="k")  # type: ignore[arg-type]
