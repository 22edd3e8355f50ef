"""How int8 is calibrated and kept right: by calls or samples, within its bound, with other weights, copied, in threads."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.backends.int8 import int8_kernels
from dovetail.backends.int8.int8_backend import Int8
from dovetail.backends.int8.int8_calibration import Calibrations, RangeObserver, closest_range, range_of
from dovetail.backends.int8.int8_kernels import Quantizer, quantised_weight
from dovetail.numerics.tolerance import Reference, difference, relative_error
from tests.backends.int8_helpers import Images, Layers, integers, lowered, needs_int8, off, reasons
from tests.lowering.helpers import Blocks, Counting, events, fused

pytestmark = needs_int8

X, IMAGE = torch.randn(6, 5, 32), torch.randn(2, 3, 16, 16)


@torch.no_grad()
def test_weights_that_are_written_or_replaced_calibrate_again() -> None:
    model = Layers().eval()
    fast = lowered(model, X)
    for _ in range(3):
        fast(X)
    assert integers(fast, X) == 2
    # What the second layer is given changes with the weights of the first.
    model.up.weight.mul_(-3)
    for _ in range(2):
        assert torch.equal(fast(X), model(X))
    assert integers(fast, X) == 2
    assert off(fast(X), model(X)) < 0.02
    model.down.weight.data = torch.randn_like(model.down.weight)
    for _ in range(3):  # the first layer has had its turn when the second notices
        fast(X)
    assert integers(fast, X) == 2
    assert off(fast(X), model(X)) < 0.02


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_steps_of_an_optimizer_calibrate_again(kind: dict[str, Any]) -> None:
    model = Layers().eval()
    fast = lowered(model, X, backend=Int8(calibrate=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kind)
    for _ in range(2):
        with torch.no_grad():
            for _ in range(2):  # the first layer has had its turn when the second notices
                fast(X)
            assert integers(fast, X) == 2
            assert off(fast(X), model(X)) < 0.02
        model(X).square().sum().backward()
        # A fused one writes without a trace in the versions of what it writes.
        optimizer.step()
    with torch.no_grad():
        assert torch.equal(fast(X), model(X))


@torch.no_grad()
def test_a_view_of_a_weight_is_watched_as_the_weight_is() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(32, 16))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ self.table.mT.mT)

    model = Head().eval()
    fast = lowered(model, X)
    for _ in range(2):
        fast(X)
    assert integers(fast, X) == 1
    model.table.mul_(-2)
    assert torch.equal(fast(X), model(X))
    fast(X)
    assert integers(fast, X) == 1
    assert off(fast(X), model(X)) < 0.02


class Counter(nn.Module):
    """Counts its calls in a buffer, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)  # type: ignore[operator]
        return self.layer(x) + torch.rand(32)


@torch.no_grad()
def test_sample_inputs_calibrate_before_the_first_call_and_leave_no_trace() -> None:
    model = Counter().eval()
    samples = [(torch.randn(6, 5, 32),), {"x": torch.randn(6, 5, 32)}, torch.randn(6, 5, 32)]
    state = torch.get_rng_state()
    fast = lowered(model, X, backend=Int8(samples))
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert integers(fast, X) == 1
    assert model.calls == 1
    assert not reasons(fast, "calibration")


@torch.no_grad()
def test_samples_that_do_not_fit_are_replaced_by_calls() -> None:
    model = Layers().eval()
    fast = lowered(model, X, backend=Int8([(torch.randn(2, 32),), (X,)]))
    assert reasons(fast, "calibration") == ["1 of 2 sample inputs match this graph; calls replace the others"]
    assert torch.equal(fast(X), model(X))
    assert integers(fast, X) == 2


@torch.no_grad()
def test_values_that_int8_cannot_hold_keep_their_call_in_float32() -> None:
    model, x = Layers().eval(), X.clone()
    # 256 steps are not fine enough for the many values that count beside a few that do not.
    x[..., :4] *= 1e4
    model.up.weight[:, :4] = 0
    fast = lowered(model, x, backend=Int8(calibrate=1))
    for _ in range(3):
        fast(x)
    (reason,) = reasons(fast, "prepare")
    assert reason.startswith("stays in float32: in int8 it is off by ")
    assert reason.endswith("and 5.0% is allowed")
    assert integers(fast, x) == 1
    allowed = lowered(model, x, backend=Int8(calibrate=1, bound=10.0))
    allowed(x)
    assert integers(allowed, x) == 2


@torch.no_grad()
def test_copies_and_pickles_are_calibrated_already() -> None:
    model = Layers().eval()
    fast = lowered(model, X, backend=Int8([(X,)], bound=0.04))
    result, names = fast(X), list(model.state_dict())
    file = io.BytesIO()
    pickle.dump(fast, file)
    file.seek(0)
    for again in (copy.deepcopy(fast), pickle.load(file)):
        assert torch.equal(again(X), result)
        assert integers(again, X) == 2
        assert list(again.state_dict()) == list(fast.state_dict()) == names


@torch.no_grad()
def test_sizes_that_vary_share_one_calibration() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(2), nn.Linear(49, 16), nn.GELU()
    ).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    fast = lowered(model, IMAGE, capture={"dynamic_shapes": ({0: batch},)}, on_error="raise", verify=True)
    for count in (2, 5):
        x = torch.randn(count, 3, 16, 16)
        assert torch.equal(fast(x), model(x))
    x = torch.randn(7, 3, 16, 16)
    assert integers(fast, x) == 2
    assert off(fast(x), model(x)) < 0.03


@torch.no_grad()
def test_other_sizes_are_other_code_with_the_same_calibration() -> None:
    model = Images().eval()
    fast = dovetail.compile(model, (IMAGE,), backends=[Int8([(IMAGE,)])])
    x = IMAGE.to(memory_format=torch.channels_last)
    result = fast(x)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert integers(fast, x) == integers(fast, IMAGE) == 2
    assert off(result, fast(IMAGE)) < 1e-5


@torch.no_grad()
def test_threads_may_calibrate_one_call_at_once() -> None:
    model = Layers().eval()
    fast = lowered(model, X, backend=Int8(calibrate=8), on_error="raise")
    expected, errors = model(X), list[float]()

    def work() -> None:
        with torch.no_grad():
            errors.extend(off(fast(X), expected) for _ in range(8))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 32
    assert max(errors) < 0.02
    assert integers(fast, X) == 2


def test_its_own_bound_is_what_verify_applies() -> None:
    gm = dovetail.fuse(dovetail.capture(Layers().eval(), (X,)), Int8().rules)
    fine = dovetail.lower(gm, [Int8(), Counting()], verify=True, cache=False)
    assert {r.backend for r in dovetail.regions(fine)} == {"int8"}
    narrow = dovetail.lower(gm, [Int8(bound=1e-4), Counting()], verify=True, cache=False)
    assert {r.backend for r in dovetail.regions(narrow)} == {"counting"}
    messages = reasons(narrow, "verify")
    assert len(messages) == 2
    assert all(t.startswith("result 0 is off by ") and t.endswith("and 0.01% is allowed") for t in messages)


@pytest.mark.parametrize("broken", ["weights", "values"])
def test_a_wrong_scale_fails_verify_and_the_next_backend_runs(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
        whole, steps = quantised_weight(weight)
        return whole, steps * 1.1

    def wrong_range(low: float, high: float) -> Any:
        return range_of(low / 4, high / 4)

    if broken == "weights":
        monkeypatch.setattr(int8_kernels, "quantised_weight", wrong_weight)
    else:
        monkeypatch.setattr(int8_kernels, "range_of", wrong_range)
    gm = dovetail.fuse(dovetail.capture(Layers().eval(), (X,)), Int8().rules)
    checked = dovetail.lower(gm, [Int8(), Counting()], verify=True, cache=False)
    assert {r.backend for r in dovetail.regions(checked)} == {"counting"}
    assert len(reasons(checked, "verify")) == 2
    trusted = dovetail.lower(gm, [Int8(), Counting()], cache=False)
    assert {r.backend for r in dovetail.regions(trusted)} == {"int8"}


class Rounds(Counting):
    """Computes as the body does, in bfloat16, and says how far off that is."""

    bound = 0.01

    def compile(self, region: dovetail.Region, examples: Sequence[Any]) -> Any:
        def run(*operands: Tensor) -> Any:
            return tuple(v.bfloat16().to(v.dtype) for v in region.body(*operands))

        return run


def test_any_backend_may_have_a_bound() -> None:
    gm = fused(Blocks().eval(), torch.randn(3, 8))
    assert {e.outcome for e in events(dovetail.lower(gm, [Rounds()], verify=True, cache=False))} == {
        "compiled"
    }
    Rounds.bound, was = 1e-4, Rounds.bound
    try:
        (reason,) = reasons(dovetail.lower(gm, [Rounds("narrow")], verify=True, cache=False), "verify")
    finally:
        Rounds.bound = was
    assert reason.endswith("of its size, and 0.01% is allowed")


def test_the_relative_error_counts_where_numbers_are_expected() -> None:
    nan, inf = float("nan"), float("inf")
    assert relative_error(torch.tensor([3.0, 5.0]), torch.tensor([3.0, nan])) == 0
    assert relative_error(torch.tensor([3.0, nan]), torch.tensor([3.0, 5.0])) == inf
    assert relative_error(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0])) == 0
    assert relative_error(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0])) == inf
    assert abs(relative_error(torch.tensor([1.1, 2.2]), torch.tensor([1.0, 2.0])) - 0.1) < 1e-6
    expected = Reference(torch.tensor([1, 2]), bound=10.0)
    assert difference(torch.tensor([1, 3]), expected) is not None  # whole numbers are exact all the same


def test_bytes_are_the_nearest_steps_and_zero_is_exact() -> None:
    x = torch.linspace(-2.5, 7.0, 9973)
    steps = range_of(-2.0, 6.0)
    quantized = Quantizer(steps, torch.contiguous_format)(x)
    expected = (x / steps.scale).round().add(steps.zero_point).clamp(0, 255)
    assert quantized.dtype is torch.uint8
    assert (quantized.float() - expected).abs().max() <= 1  # halves may go either way
    assert (quantized.float() != expected).float().mean() < 1e-3
    assert Quantizer(steps, torch.contiguous_format)(torch.zeros(3)).tolist() == [steps.zero_point] * 3
    assert Quantizer(steps, torch.contiguous_format)(torch.tensor([1e30, -1e30])).tolist() == [255, 0]
    assert (range_of(1.0, 2.0).zero_point, range_of(-2.0, -1.0).zero_point) == (0, 255)
    assert range_of(0.0, 0.0).scale == 1.0


def test_a_few_far_values_are_cut_off_where_that_is_closer() -> None:
    values = torch.randn(300_000).clamp(-4, 4)
    assert closest_range(-4.0, 4.0, values).scale < 8.1 / 255
    far = torch.cat([values, torch.tensor([10.0])])
    assert closest_range(-4.0, 10.0, far).scale < 13 / 255
    assert closest_range(0.0, 60.0, torch.rand(1000) * 60).scale > 59 / 255


def test_what_is_watched_is_finite_and_not_empty() -> None:
    watch = RangeObserver()
    for x in (torch.empty(0, 4), torch.tensor([1.0, float("inf")]), torch.tensor([float("nan")])):
        watch(x)
    assert watch.observed() is None
    watch(torch.tensor([-1.0, 3.0]))
    ranges = watch.observed()
    assert ranges is not None
    assert abs(ranges.range.scale - 4 / 255) < 1e-6


def test_new_weights_in_one_call_make_all_begin_again() -> None:
    known = Calibrations()
    first, second = known.of("a", "1", (-1,), 4), known.of("b", "1", (-1,), 4)
    assert known.of("a", "1", (-1,), 4) is first
    again = known.of("a", "2", (-1,), 4)
    assert again is not first
    assert second.generation != known.generation
    assert known.of("b", "1", (-1,), 4) is not second
    assert known.of("a", "2", (-1,), 4) is again


@pytest.mark.parametrize("form", ["linear", "groups"])
@torch.no_grad()
def test_errors_of_weights_are_corrected_on_average(form: str) -> None:
    x = torch.randn(64, 4, 8, 8) + torch.tensor([30.0, -20.0, 10.0, 5.0]).reshape(-1, 1, 1)
    layer: nn.Module = nn.Conv2d(4, 6, 3, groups=2) if form == "groups" else nn.Linear(8, 6)
    whole, steps = quantised_weight(layer.get_parameter("weight"))
    shape = [-1] + [1] * (whole.dim() - 1)
    coarse = copy.deepcopy(layer)
    coarse.get_parameter("weight").copy_(whole * steps.reshape(shape))
    fast = lowered(layer.eval(), x, backend=Int8(calibrate=1))
    fast(x)
    assert integers(fast, x) == 1

    def mean(value: Tensor) -> Tensor:
        return value.mean((0, 2, 3) if form == "groups" else (0, 1, 2))

    expected = mean(layer(x))
    uncorrected, corrected = ((mean(v) - expected).norm() for v in (coarse(x), fast(x)))
    assert corrected < uncorrected / 4


def test_outputs_of_zeros_have_steps_too() -> None:
    weight = torch.randn(3, 8)
    weight[1] = 0
    whole, steps = quantised_weight(weight)
    assert whole[1].tolist() == [0] * 8
    assert (whole.abs().amax(1)[[0, 2]] == 127).all()
    assert ((whole * steps[:, None]) - weight).abs().max() <= steps.max() / 2 + 1e-6


@torch.no_grad()
def test_a_call_that_is_not_finite_is_not_calibrated_on() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU()).eval()
    fast = lowered(model, X, backend=Int8(calibrate=1))
    bad = X.clone()
    bad[0, 0, 0] = float("nan")
    assert fast(bad).isnan().any()
    assert torch.equal(fast(X), F.relu(model[0](X)))
    assert integers(fast, X) == 1
