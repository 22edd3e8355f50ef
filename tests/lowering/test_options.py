"""The options of a lowering: the same ones wherever they are given, and checked there."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import dovetail
from dovetail import InvalidArgument
from dovetail.lowering.assign import preferences
from dovetail.lowering.backend_protocol import backend_with_options, by_name
from dovetail.lowering.options import Options
from dovetail.runtime.torch_compile import backend
from tests.lowering.helpers import Blocks, fused

WRONG = [
    ("on_error", "explode", "'fallback' or 'raise'"),
    ("verify", 1, "True or False"),
    ("granularity", "middle", "'outer' or 'inner'"),
    ("smallest", 0, "1 or more"),
    ("smallest", True, "1 or more"),
    ("recompile_limit", 0, "1 or more, or None for dovetail.config.recompile_limit"),
    ("timeout", 0, "seconds, or None for the backend's own"),
    ("timeout", float("nan"), "seconds, or None for the backend's own"),
    ("cache", None, "True, False or a folder"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_what_is_wrong_is_reported_where_it_is_given(name: str, value: Any, expected: str) -> None:
    model, gm = Blocks(), GraphModule(nn.Module(), Graph())
    given: dict[str, Any] = {name: value}
    for give in (
        lambda: dovetail.lower(gm, "eager", **given),
        lambda: dovetail.Lower("eager", **given),
        lambda: dovetail.compile(model, backends="eager", **given),
        lambda: backend(gm, (), options={"backends": "eager", **given}),
    ):
        with pytest.raises(InvalidArgument) as caught:
            give()
        assert str(caught.value) == f"{name} {value!r}; give {expected}."


def test_what_is_wrong_as_a_plan_is_reported_with_what_is_right_there() -> None:
    model, gm = Blocks(), GraphModule(nn.Module(), Graph())
    mapping = "a mapping from the keys of bodies to backends"
    for give in (
        lambda: dovetail.lower(gm, "eager", plan=["eager"]),  # type: ignore[arg-type]
        lambda: dovetail.Lower("eager", plan=["eager"]),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument) as caught:
            give()
        assert str(caught.value) == f"plan ['eager']; give {mapping}; a dovetail.Plan goes to `compile`."
    for give in (
        lambda: dovetail.compile(model, backends="eager", plan=["eager"]),  # type: ignore[arg-type]
        lambda: backend(gm, (), options={"backends": "eager", "plan": ["eager"]}),
    ):
        with pytest.raises(InvalidArgument) as caught:
            give()
        assert str(caught.value) == f"plan ['eager']; give a dovetail.Plan, the path of one, or {mapping}."


def test_every_option_can_be_given_everywhere_with_the_same_default() -> None:
    options = {f.name: f.default for f in fields(Options)}
    for function, without in (
        (dovetail.lower, set[str]()),
        (dovetail.Lower, set[str]()),
        (dovetail.compile, {"grad"}),
    ):
        defaults = {n: p.default for n, p in inspect.signature(function).parameters.items() if n in options}
        assert defaults == {n: v for n, v in options.items() if n not in without}


def test_a_lowered_graph_keeps_no_plan() -> None:
    gm = fused(Blocks().eval(), torch.randn(3, 8))
    (key,) = {r.key for r in dovetail.regions(gm)}
    lowered = dovetail.lower(gm, [], plan={key: "eager"}, cache=False)
    assert {r.backend for r in dovetail.regions(lowered)} == {"eager"}
    assert lowered.meta["dovetail.lowering"].options.plan is None


def test_a_planned_body_may_run_as_it_is_or_be_small_and_options_of_backends_are_kept_apart() -> None:
    gm = dovetail.capture(lambda x, y: (torch.relu(x) * 2, y.sin()), (torch.randn(3), torch.randn(3)))
    gm = dovetail.outline(gm, [dovetail.Request(["relu", "mul"], "two"), dovetail.Request(["sin"], "one")])
    two, one = (r.key for r in dovetail.regions(gm))

    def backends(**options: Any) -> list[str | None]:
        return [r.backend for r in dovetail.regions(dovetail.lower(gm, "eager", cache=False, **options))]

    assert backends() == ["eager", None]
    assert backends(plan={two: []}) == [None, None]
    assert backends(plan={one: ["eager"]}) == ["eager", "eager"]
    assert backends(plan={two: [], one: ["eager"]}) == [None, "eager"]

    bf16, f32 = (backend_with_options("openvino", {"precision": p}) for p in ("bf16", "f32"))
    chains = preferences({two: [bf16], one: [f32]}, dovetail.regions(gm))
    assert chains == {two: (bf16,), one: (f32,)}


def test_backends_by_name_take_options_and_are_one_object_for_equal_ones() -> None:
    quick = backend_with_options("openvino", {"precision": "bf16"})
    assert quick is backend_with_options("openvino", {"precision": "bf16"})
    assert quick is not by_name("openvino")
    assert backend_with_options("openvino", {}) is by_name("openvino")
    assert backend_with_options("cuda_graphs(eager)", {"reuse_outputs": True}).name == "cuda_graphs(eager)"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("inductor", {"option": 1}, "the backend 'inductor' has no option 'option'. Did you mean 'options'?"),
        ("torchscript", {"x": 1}, "the backend 'torchscript' has no option 'x'. It takes none."),
        ("openvino", {"precision": "f8"}, "precision 'f8'; give 'f32', 'bf16' or 'f16'."),
        ("inductor", {"options": {"a": object}}, "options of the backend 'inductor' have no JSON form: "),
        ("inductr", {"options": {}}, "there is no backend 'inductr'. Did you mean 'inductor'?"),
    ],
)
def test_options_that_a_backend_does_not_take_are_refused(name: str, options: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        backend_with_options(name, options)
    assert str(caught.value).startswith(message)
