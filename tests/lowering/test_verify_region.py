"""Verifying tells code that is only almost right, and leaves alone what is as good as the body."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dovetail
from dovetail.lowering.compile_unit import CompileUnit, unit_of
from dovetail.lowering.guards import expected_specialization
from dovetail.lowering.verify_region import reference_mismatch, uncovered, verify_unit
from dovetail.numerics.sample_inputs import fake_inputs, random_inputs, storage_span
from dovetail.numerics.tolerance import Reference, difference
from dovetail.outlining.outline import Request
from dovetail.rules.library import KINDS
from tests.lowering.helpers import Blocks, Counting, events, fused


def unit(function: Callable[..., Any], *args: Any) -> CompileUnit:
    """All operations of a function as one region."""
    gm = dovetail.capture(function, args)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    return unit_of(dovetail.regions(dovetail.outline(gm, calls, kind="whole"))[0])


def verified(whole: CompileUnit, run: Callable[..., Any], *, grad: bool = False) -> str | None:
    flags = [isinstance(v, Tensor) and v.dtype.is_floating_point for v in whole.values]
    specialization = expected_specialization(whole.values, flags, grad=grad)
    return verify_unit(whole, run, fake_inputs(specialization, whole.values), specialization)


def mlp(x: Tensor, w: Tensor) -> Tensor:
    return F.softmax(F.gelu(x @ w), -1) + x


def reference(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (mlp(x, w),)


def in_bfloat16(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return ((mlp(x.bfloat16(), w.bfloat16())).float(),)


OPERANDS = (torch.randn(6, 32), torch.randn(32, 32))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_same_computation_in_other_steps_passes(dtype: torch.dtype, grad: bool) -> None:
    whole = unit(mlp, *(a.to(dtype) for a in OPERANDS))

    def otherwise(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = (x.unsqueeze(-1) * w).sum(-2)
        y = y * 0.5 * (1 + torch.erf(y * 2**-0.5))
        e = torch.exp(y - y.amax(-1, keepdim=True))
        return (e / e.sum(-1, keepdim=True) + x,)

    assert verified(whole, otherwise, grad=grad) is None
    assert verified(whole, whole.region.body, grad=grad) is None


def test_narrow_code_may_compute_in_a_wider_dtype() -> None:
    whole = unit(mlp, *(a.bfloat16() for a in OPERANDS))
    assert verified(whole, lambda x, w: (mlp(x.float(), w.float()).bfloat16(),), grad=True) is None


def test_wide_code_that_is_only_as_good_as_a_narrow_dtype_is_reported() -> None:
    whole = unit(mlp, *OPERANDS)
    reason = verified(whole, in_bfloat16)
    assert reason is not None
    assert reason.startswith("result 0 is off by 0.")
    assert "where the body has" in reason
    tenth = verified(whole, lambda x, w: (mlp(x, (w * 2**10).round() / 2**10),))
    assert tenth is not None  # as if ten bits of a number were read, as some matrix units do


@pytest.mark.parametrize(("factor", "dtype"), [(1.0001, torch.float32), (1.1, torch.bfloat16)])
def test_slightly_wrong_numbers_are_reported(factor: float, dtype: torch.dtype) -> None:
    whole = unit(mlp, *(a.to(dtype) for a in OPERANDS))
    reason = verified(whole, lambda x, w: (mlp(x, w) * factor,))
    assert reason is not None
    assert " of 192 wrong)" in reason


def test_one_wrong_number_is_reported_with_its_place() -> None:
    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        result = mlp(x, w)
        result[2, 7] += 0.5
        return (result,)

    reason = verified(unit(mlp, *OPERANDS), run)
    assert reason is not None
    assert "off by 0.5 at [2, 7]" in reason
    assert "1 of 192 wrong" in reason


def test_nothing_is_asked_of_noise_but_that_it_is_noise() -> None:
    # Adding to all keys moves no softmax: the gradient is zero, and what comes out is rounding.
    def attention(k: Tensor, bias: Tensor, q: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k + bias, v)

    def by_hand(k: Tensor, bias: Tensor, q: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (torch.softmax((q @ (k + bias).mT) * 8**-0.5, -1) @ v,)

    k, q, v = torch.randn(3, 2, 3, 9, 8)
    whole = unit(attention, k, torch.randn(8), q, v)
    assert verified(whole, by_hand, grad=True) is None
    wrong = verified(whole, lambda k, b, q, v: (by_hand(k, b, q, v)[0] + (b - b.detach()).sum(),), grad=True)
    assert wrong is not None
    assert wrong.startswith("the gradient of operand 1 is off")


def test_sums_that_cancel_may_be_taken_in_another_order() -> None:
    whole = unit(lambda x: (x.sum(), x.mean(0)), torch.randn(300, 400))
    assert verified(whole, lambda x: (x.cumsum(0)[-1].cumsum(0)[-1], x.cumsum(0)[-1] / 300)) is None
    assert verified(whole, lambda x: (x.bfloat16().sum().float(), x.mean(0))) is not None


def test_values_that_are_not_finite_stand_where_the_body_has_them() -> None:
    whole = unit(lambda x: x.log(), torch.randn(5, 5))
    assert verified(whole, lambda x: (x.log(),)) is None
    reason = verified(whole, lambda x: (x.log().nan_to_num(),))
    assert reason is not None
    assert "where the body has nan" in reason
    reason = verified(unit(lambda x: x * 2, torch.randn(3)), lambda x: (x * 2 / 0,))
    assert reason is not None
    assert "inf" in reason


def test_an_overflow_that_wider_code_does_not_have_is_no_fault() -> None:
    whole = unit(lambda x: (x * 60000 * 4) / 8, torch.randn(64).half())
    assert verified(whole, lambda x: ((x.float() * 30000).half(),)) is None
    assert verified(whole, lambda x: ((x.float() * 20000).half(),)) is not None


def test_whole_numbers_and_truth_are_exact() -> None:
    whole = unit(lambda x: (x.argmax(-1), x > 0), torch.randn(4, 9))
    assert verified(whole, lambda x: (x.argmax(-1), x > 0)) is None
    reason = verified(whole, lambda x: (x.argmax(-1) + 1, x > 0))
    assert reason is not None
    assert reason.startswith("result 0 is ")
    reason = verified(whole, lambda x: (x.argmax(-1), x >= 1))
    assert reason is not None
    assert "result 1 is False" in reason


def test_complex_numbers() -> None:
    whole = unit(lambda x: torch.fft.fft(x), torch.randn(8, 8))
    assert verified(whole, lambda x: (torch.fft.fft(x.double()).to(torch.complex64),)) is None
    assert verified(whole, lambda x: (torch.fft.fft(x).conj().resolve_conj(),)) is not None


def test_gradients_are_compared_where_they_are_recorded() -> None:
    whole = unit(mlp, *OPERANDS)

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * 1.001

    def run(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (mlp(x, Wrong.apply(w)),)

    assert verified(whole, run) is None
    reason = verified(whole, run, grad=True)
    assert reason is not None
    assert reason.startswith("the gradient of operand 1 is off")
    missing = verified(whole, lambda x, w: (mlp(x, w.detach()),), grad=True)
    assert missing is not None
    assert missing.startswith("the gradient of operand 1 is off")


def test_gradients_that_are_not_there_are_reported() -> None:
    reason = verified(unit(mlp, *OPERANDS), lambda x, w: (mlp(x, w).detach(),), grad=True)
    assert reason == "it does not give what the body gives: the gradient of operand 0"


@pytest.mark.parametrize("grad", [False, True])
def test_written_operands_are_compared_after_the_call(grad: bool) -> None:
    def update(total: Tensor, x: Tensor) -> Tensor:
        total.mul_(0.9).add_(x)
        return total.relu() * 2

    gm = dovetail.capture(torch.fx.symbolic_trace(update), (torch.randn(4), torch.randn(4)))
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    whole = unit_of(dovetail.regions(dovetail.outline(gm, calls, kind="update"))[0])
    assert whole.effects.writes == {0}

    def other(total: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        total.copy_(0.9 * total + x)
        return (total.relu() * 2,)

    def forgets(total: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return ((0.9 * total + x).relu() * 2,)

    def writes_more(total: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        result = other(total, x)
        x.detach().add_(1)
        return result

    assert verified(whole, other, grad=grad) is None
    reason = verified(whole, forgets, grad=grad)
    assert reason is not None
    assert reason.startswith("operand 0 after the call is off")
    assert verified(whole, writes_more) == "it wrote operand 1, which the body leaves as it is"


def test_of_random_bodies_only_shapes_are_compared_and_that_is_recorded() -> None:
    whole = unit(lambda x: F.dropout(x.relu(), 0.5), torch.randn(4, 8))
    assert verified(whole, lambda x: (x * 7,)) is None
    assert uncovered(whole, whole.values) == "shapes only: it draws random numbers"
    reason = verified(whole, lambda x: (x.sum(0),))
    assert reason == "result 0 is torch.float32 of shape (8,), not torch.float32 of (4, 8)"
    assert uncovered(unit(mlp, *OPERANDS), OPERANDS) is None


def test_the_random_state_is_kept() -> None:
    whole = unit(lambda x: F.dropout(x, 0.5) + 1, torch.randn(4))
    before = torch.get_rng_state()
    assert verified(whole, lambda x: (torch.rand(4),)) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_body_that_does_not_take_sample_operands_is_not_compared() -> None:
    whole = unit(lambda x: torch.linalg.cholesky(x) + 1, torch.eye(3))
    assert verified(whole, lambda x: (x,)) is None


def test_what_has_no_double_precision_is_compared_with_the_body() -> None:
    whole = unit(lambda x: x.view(torch.int32).bitwise_and(-65536).view(torch.float32) * 2, torch.randn(9))
    assert (
        verified(whole, lambda x: (x.view(torch.int32).bitwise_and(-65536).view(torch.float32) * 2,)) is None
    )
    assert verified(whole, lambda x: (x * 2,)) is not None


def test_sample_operands_may_lie_over_themselves() -> None:
    x = torch.empty(4).expand(3, 4)
    (sample,) = random_inputs([x])
    assert sample.stride() == (0, 1)
    assert torch.equal(sample[0], sample[2])
    windows = torch.empty(9).unfold(0, 3, 1)
    assert random_inputs([windows])[0].stride() == (1, 1)
    assert storage_span((3, 4), (0, 1)) == 4
    assert storage_span((3, 0), (4, 1)) == 0
    whole = unit(lambda x: x.relu() + 1, x)
    assert verified(whole, lambda x: (x.clamp_min(0) + 1,), grad=True) is None


def test_where_double_precision_is_another_computation_the_body_counts() -> None:
    whole = unit(lambda x: torch.sin(x * 1e6), torch.randn(50))
    assert verified(whole, lambda x: (torch.sin(x * 1e6),)) is None
    assert verified(whole, lambda x: (torch.sin(x * 1e6) + 1e-3,)) is not None


def test_empty_and_unlike_values() -> None:
    assert difference(torch.empty(0), Reference(torch.empty(0))) is None
    assert difference(torch.empty(2), Reference(torch.empty(3))) == "has shape (2,), not (3,)"
    assert difference(torch.zeros(2), Reference(torch.zeros(2, dtype=torch.int64))) == (
        "has dtype torch.float32, not torch.int64"
    )
    assert difference(torch.zeros(2), Reference(torch.zeros(2), torch.zeros(2))) is None
    assert difference(torch.ones(2), Reference(torch.zeros(2), torch.zeros(2))) is not None


class Rounds(Counting):
    """Computes as the body does, in bfloat16."""

    def compile(self, region: dovetail.Region, examples: Sequence[Any]) -> Callable[..., Any]:
        def run(*operands: Tensor) -> Any:
            return tuple(v.bfloat16().to(v.dtype) for v in region.body(*operands))

        return run


def test_lower_with_verify_moves_on_to_the_next_backend() -> None:
    model, x = Blocks().eval(), torch.randn(3, 8)
    gm = fused(model, x)
    trusted = dovetail.lower(gm, [Rounds("rounds"), Counting()], cache=False)
    assert {r.backend for r in dovetail.regions(trusted)} == {"rounds"}
    checked = dovetail.lower(gm, [Rounds("rounds"), Counting()], verify=True, cache=False)
    assert {r.backend for r in dovetail.regions(checked)} == {"counting"}
    first = events(checked)[0]
    assert (first.backend, first.outcome) == ("rounds", "verify")
    assert "result 0 is off by" in first.reason
    with torch.no_grad():
        assert torch.equal(checked(x), model(x))


def test_the_record_has_what_was_not_verified() -> None:
    def noisy(x: Tensor) -> Tensor:
        return F.dropout(x.relu() * 2, 0.5)

    gm = dovetail.fuse(dovetail.capture(noisy, (torch.randn(4, 8),)))
    lowered = dovetail.lower(gm, [Counting()], verify=True, cache=False)
    assert events(lowered)[0].reason == "not verified in full: shapes only: it draws random numbers"
    unverified = dovetail.lower(gm, [Counting("other")], cache=False)
    assert events(unverified)[0].reason == ""


def test_an_operand_that_is_written_may_require_gradients() -> None:
    def scale(x: Tensor) -> Tensor:
        return x.mul_(2).relu()

    x = torch.randn(4)
    gm = dovetail.capture(torch.fx.symbolic_trace(scale), (x,))
    calls = [n for n in gm.graph.nodes if n.op == "call_method"]
    new = dovetail.outline(gm, calls, kind="scale")
    lowered = dovetail.lower(new, [Counting()], verify=True, cache=False)
    leaf = x.clone().requires_grad_()
    lowered(leaf * 1).sum().backward()
    assert {e.outcome for e in events(lowered)} == {"compiled"}
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, 2.0 * (x > 0))


def test_sizes_that_may_vary_are_tried_at_the_example_s() -> None:
    x = torch.randn(4, 8)
    gm = dovetail.capture(
        mlp, (x, torch.randn(8, 8)), dynamic_shapes=({0: torch.export.Dim("n", min=2)}, None)
    )
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    whole = unit_of(dovetail.regions(dovetail.outline(gm, calls, kind="whole"))[0])
    for grad in (False, True):
        assert verified(whole, reference, grad=grad) is None
        assert verified(whole, lambda x, w: (mlp(x, w) * 1.001,), grad=grad) is not None


def test_a_reference_has_the_dtype_of_the_body() -> None:
    # In float64, where both are compared, no difference is left.
    def pooled(dtype: torch.dtype) -> str | None:
        gm = dovetail.capture(lambda x: x.mean((2, 3), dtype=dtype), (torch.randn(2, 3, 4, 4),))
        x, mean, _ = gm.graph.nodes
        attrs = {"kernel": "global", "stride": None, "keepdim": False}
        request = Request([mean.name], "avg_pool", 2, attrs, arguments={"x": x}, results=(mean,))
        whole = unit_of(dovetail.regions(dovetail.outline(gm, [request]))[0])
        return reference_mismatch(whole, whole.values)

    assert pooled(torch.float32) is None
    reason = pooled(torch.float64)
    assert reason is not None
    assert "is torch.float64, the reference torch.float32" in reason


def test_a_reference_that_does_not_take_the_dtypes_of_the_body_is_a_reason() -> None:
    # In float64 all operands have one dtype.
    q, kind = torch.randn(2, 4, 8), KINDS["attention"]
    gm = dovetail.capture(lambda q, k: torch.softmax(q @ k.float().mT, -1) @ q, (q, q.half()))
    first, second, *calls, _ = gm.graph.nodes
    named = {"q": first, "k": second, "v": first}
    attrs = kind.complete({"scale": 1.0})
    request = Request(calls, kind.name, kind.version, attrs, arguments=named, results=(calls[-1],))
    whole = unit_of(dovetail.regions(dovetail.outline(gm, [request]))[0])
    reason = reference_mismatch(whole, whole.values)
    assert reason is not None
    assert "in its own dtypes the reference raised RuntimeError" in reason
