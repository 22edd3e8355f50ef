"""Kernels by kind are called by the names of a pattern, with all attributes, or not at all and it is said why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import dovetail
from dovetail import Backend, Decline, Request
from dovetail.lowering.backend_protocol import Unfit, kernel_call, misfit
from tests.lowering.helpers import events

X, W = torch.randn(3, 4), torch.randn(4)


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    return (x * 3 + 1) * weight


def outlined(function: Callable[..., Any], *args: Tensor, **request: Any) -> GraphModule:
    """All operations of a function as one region; names of nodes in place of nodes."""
    gm = dovetail.capture(function, args)
    nodes = {n.name: n for n in gm.graph.nodes}
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    named = {k: nodes[v] for k, v in request.pop("arguments", {}).items()}
    ordered = tuple(nodes[v] for v in request.pop("results", ()))
    options: dict[str, Any] = {"kind": "scaled", "escapes": "output", **request}
    return dovetail.outline(gm, [Request(calls, arguments=named or None, results=ordered, **options)])


class Library(Backend):
    name = "library"

    def __init__(self, **kernels: Callable[..., Any]) -> None:
        self.kernels = kernels  # type: ignore[misc]


def lowered(gm: GraphModule, kernel: Callable[..., Any]) -> GraphModule:
    return dovetail.lower(gm, [Library(scaled=kernel)], cache=False)


NAMED = {"gain": "weight", "data": "x"}


def test_a_kernel_is_called_by_the_names_of_the_pattern() -> None:
    calls: list[str] = []

    def kernel(gain: Tensor, data: Tensor) -> Tensor:
        calls.append("kernel")
        return (data * 3 + 1) * gain

    gm = lowered(outlined(scaled, X, W, arguments=NAMED), kernel)
    assert dovetail.regions(gm)[0].backend == "library"
    calls.clear()
    assert torch.equal(gm(X, W), scaled(X, W))
    assert calls == ["kernel"]


def test_without_names_the_operands_go_in_order() -> None:
    gm = lowered(outlined(scaled, X, W), lambda a, b: [(a * 3 + 1) * b])
    assert dovetail.regions(gm)[0].backend == "library"
    assert torch.equal(gm(X, W), scaled(X, W))


def test_attributes_are_keywords() -> None:
    def kernel(data: Tensor, gain: Tensor, *, factor: float, offset: float = 0.0) -> Tensor:
        return (data * factor + offset) * gain

    gm = outlined(scaled, X, W, arguments=NAMED, attrs={"factor": 3, "offset": 1})
    assert torch.equal(lowered(gm, kernel)(X, W), scaled(X, W))


def test_an_attribute_that_a_kernel_overlooks_is_a_reason() -> None:
    gm = outlined(scaled, X, W, arguments=NAMED, attrs={"factor": 3, "approximate": True})
    new = lowered(gm, lambda data, gain, factor: (data * factor + 1) * gain)
    assert dovetail.regions(new)[0].backend is None
    assert events(new)[0].reason == (
        "the kernel cannot be called with gain, data and the attributes approximate, factor: "
        "got an unexpected keyword argument 'approximate'"
    )
    assert torch.equal(new(X, W), scaled(X, W))
    # One that takes whatever there is has said so.
    assert misfit(lambda data, gain, **rest: data, dovetail.regions(gm)[0]) is None


def three_results(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    total = x + y
    return total.relu(), total.sum(-1), total


def test_results_come_in_another_order() -> None:
    gm = outlined(three_results, X, X + 1, arguments={"a": "x", "b": "y"}, results=["sum_1", "add", "relu"])
    region = dovetail.regions(gm)[0]
    assert sorted(region.results) == [0, 1, 2]  # type: ignore[type-var]
    assert region.results != (0, 1, 2)

    def kernel(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return (a + b).sum(-1), a + b, (a + b).relu()

    new = lowered(gm, kernel)
    assert dovetail.regions(new)[0].backend == "library"
    for result, expected in zip(new(X, X + 1), three_results(X, X + 1), strict=True):
        assert torch.equal(result, expected)


def test_a_result_that_nobody_reads_is_not_asked_for() -> None:
    def first(x: Tensor, y: Tensor) -> Tensor:
        total = x + y
        return total.relu() + 1

    gm = outlined(first, X, X + 1, arguments={"a": "x", "b": "y"}, results=["relu", "add_1"])
    new = lowered(gm, lambda a, b: ((a + b).relu(), (a + b).relu() + 1))
    assert dovetail.regions(new)[0].results == (1,)
    assert torch.equal(new(X, X + 1), first(X, X + 1))


def test_a_value_from_inside_is_a_reason() -> None:
    gm = outlined(three_results, X, X + 1, arguments={"a": "x", "b": "y"}, results=["relu", "sum_1"])
    new = lowered(gm, lambda a, b: ((a + b).relu(), (a + b).sum(-1)))
    assert dovetail.regions(new)[0].backend is None
    assert "an inner value, which a kernel for the whole region does not compute" in events(new)[0].reason
    assert torch.equal(new(X, X + 1)[2], X + (X + 1))


def test_an_operand_without_a_name_is_a_reason() -> None:
    gm = outlined(scaled, X, W, arguments={"data": "x"})
    new = lowered(gm, lambda data: data)
    assert events(new)[0].reason == "its operand 'weight' is not an argument of the pattern (data)"
    assert torch.equal(new(X, W), scaled(X, W))


def test_a_kernel_that_wants_more_than_there_is() -> None:
    gm = outlined(scaled, X, W, arguments=NAMED)
    new = lowered(gm, lambda data, gain, bias: data)
    assert events(new)[0].reason == (
        "the kernel cannot be called with gain, data: missing a required argument: 'bias'"
    )
    unnamed = lowered(outlined(scaled, X, W), lambda data: data)
    assert "too many positional arguments" in events(unnamed)[0].reason
    assert misfit(lambda data, gain, bias=None: data, dovetail.regions(gm)[0]) is None


def test_a_name_that_is_an_argument_and_an_attribute() -> None:
    gm = outlined(scaled, X, W, arguments=NAMED, attrs={"gain": 1})
    assert events(lowered(gm, lambda data, gain: data))[0].reason == (
        "'gain' is an argument and an attribute at once"
    )


def test_one_operand_may_be_two_arguments() -> None:
    gm = outlined(lambda x: (x * x + 1).relu(), X, arguments={"a": "x", "b": "x"})
    new = lowered(gm, lambda a, b: (a * b + 1).relu())
    assert dovetail.regions(new)[0].backend == "library"
    assert torch.equal(new(X), (X * X + 1).relu())


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (lambda x, weight: (x, x), "the kernel returned 2 results where the region has 1"),
        (lambda x, weight: (), "the kernel returned 0 results where the region has 1"),
        (lambda x, weight: None, "the kernel returned a NoneType, neither a tensor nor a tuple of them"),
        (lambda x, weight: x[0], "has shape (4,), not (3, 4)"),
    ],
)
def test_a_kernel_that_returns_something_else(kernel: Callable[..., Any], reason: str) -> None:
    new = lowered(outlined(scaled, X, W), kernel)
    assert dovetail.regions(new)[0].backend is None
    assert reason in events(new)[0].reason
    assert torch.equal(new(X, W), scaled(X, W))


def test_a_kernel_that_misses_a_result_of_the_pattern() -> None:
    gm = outlined(three_results, X, X + 1, arguments={"a": "x", "b": "y"}, results=["sum_1", "add", "relu"])
    new = lowered(gm, lambda a, b: ((a + b).sum(-1), a + b))
    assert "the kernel returned 2 results where the region has 3" in events(new)[0].reason


def test_a_kernel_for_one_width_is_used_at_that_width() -> None:
    class Four(Library):
        def supports(self, region: dovetail.Region) -> Any:
            answer = super().supports(region)
            width = region.inputs[0].meta["val"].shape[-1]
            return Decline(f"a last dimension of {width}, not 4") if width != 4 else answer

    mine = Four(scaled=lambda x, weight: (x * 3 + 1) * weight)
    five = torch.randn(3, 5)
    at_four = dovetail.lower(outlined(scaled, X, W), [mine], cache=False)
    at_five = dovetail.lower(outlined(scaled, five, five[0]), [mine], cache=False)
    assert dovetail.regions(at_four)[0].backend == "library"
    assert dovetail.regions(at_five)[0].backend is None
    assert events(at_five)[0].reason == "a last dimension of 5, not 4"
    assert torch.equal(at_four(X, W), scaled(X, W))
    assert torch.equal(at_five(five, five[0]), scaled(five, five[0]))


def test_kinds_without_a_kernel_are_declined() -> None:
    gm = outlined(scaled, X, W, kind="other")
    new = lowered(gm, lambda x, weight: x)
    assert events(new)[0].reason == "'library' has no kernel for kind 'other'"


def test_an_operator_is_a_kernel_too() -> None:
    gm = outlined(lambda x: x.relu(), X, kind="scaled")
    new = lowered(gm, torch.ops.aten.relu.default)
    assert dovetail.regions(new)[0].backend == "library"
    assert torch.equal(new(X), X.relu())


def test_kernel_call_alone_raises_what_does_not_fit() -> None:
    region = dovetail.regions(outlined(scaled, X, W, arguments={"data": "x"}))[0]
    with pytest.raises(Unfit, match="its operand 'weight'"):
        kernel_call(lambda data: data, region)


def fused(function: Callable[..., Any], *args: Any) -> GraphModule:
    return dovetail.fuse(dovetail.capture(function, args), dovetail.rules.library.ALL)


Q, MASK = torch.randn(2, 4, 8, 16), torch.rand(8, 8) > 0.3


def test_a_kernel_takes_masked_attention() -> None:
    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        scale: Any,
        mask_type: str,
        safe_softmax: bool,
    ) -> Tensor:
        assert (mask_type, safe_softmax) == ("keep", True)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)

    def attend(q: Tensor, mask: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)

    gm = dovetail.lower(fused(attend, Q, MASK), [Library(attention=kernel)], cache=False, verify=True)
    assert [r.backend for r in dovetail.regions(gm)] == ["library"]
    torch.testing.assert_close(gm(Q, MASK), attend(Q, MASK))


SQUARE = torch.randn(16, 16)


def test_attributes_at_the_default_of_a_kind_need_no_parameter_and_others_do() -> None:
    def kernel(x: Tensor, weight: Tensor, *, activation: str) -> Tensor:
        assert activation == "relu"
        return torch.relu(torch.nn.functional.linear(x, weight))

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(torch.nn.functional.linear(x, SQUARE)), torch.relu(x @ SQUARE)

    x = torch.randn(3, 16)
    gm = dovetail.lower(fused(both, x), [Library(linear_activation=kernel)], cache=False)
    assert [r.backend for r in dovetail.regions(gm)] == ["library", None]
    torch.testing.assert_close(gm(x), both(x))
    assert any("weight_layout" in e.reason for e in events(gm))


def test_a_table_with_a_kind_or_an_argument_that_is_nearly_right_names_which_is_meant() -> None:
    def normed(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x * 2, (16,), w, 1e-6)

    gm = fused(normed, torch.randn(3, 16), torch.randn(16))
    (region,) = dovetail.regions(gm, kind="rms_norm")
    answer = Library(rmsnorm=lambda x, weight, eps: x).supports(region)
    assert isinstance(answer, Decline)
    assert "it has one for 'rmsnorm': did you mean 'rms_norm'?" in answer.reason
    answer = Library(rms_norm=lambda x, weights, eps: x).supports(region)
    assert isinstance(answer, Decline)
    assert "'weights' may be meant for 'weight'" in answer.reason
    answer = Library(softmax=lambda x: x).supports(region)
    assert isinstance(answer, Decline)
    assert "did you mean" not in answer.reason


def test_a_region_that_is_not_what_its_kind_specifies_is_not_given_to_a_kernel_when_verified() -> None:
    gm = dovetail.capture(lambda x, w: torch.relu(x @ w), (torch.randn(3, 16), SQUARE))
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    inputs = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
    attrs = {"activation": "relu", "weight_layout": "out_in", "slope": None}
    named = {"x": inputs["x"], "weight": inputs["w"]}
    request = Request(calls, "linear_activation", 2, attrs, arguments=named, results=(calls[-1],))
    gm = dovetail.outline(gm, [request])

    def kernel(x: Tensor, weight: Tensor, *, activation: str) -> Tensor:
        return torch.relu(x @ weight)

    new = dovetail.lower(gm, [Library(linear_activation=kernel)], cache=False, verify=True)
    assert [r.backend for r in dovetail.regions(new)] == [None]
    assert any("it is not of kind 'linear_activation'" in e.reason for e in events(new))
