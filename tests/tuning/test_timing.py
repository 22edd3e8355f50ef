"""Timing: intervals, the noise of a run against itself, and verdicts that do not depend on luck."""

import random
import time
from collections.abc import Sequence

import pytest
import torch

from dovetail.tuning.timing import (
    Interleaved,
    Run,
    Timer,
    compare,
    median_interval,
    noise_of,
    peak_bytes,
    spread_of,
)

CPU = torch.device("cpu")


def drawn(median: float, count: int, seed: int, spread: float = 0.03) -> list[float]:
    """Times of a busy machine: most near the median, some far above it."""
    draw = random.Random(seed)
    return [
        median * draw.lognormvariate(0, spread) * (3 if draw.random() < 0.05 else 1) for _ in range(count)
    ]


def test_the_interval_holds_the_median_as_often_as_it_claims() -> None:
    draw = random.Random(0)
    held = 0
    for _ in range(1000):
        low, high = median_interval([draw.gauss(0, 1) for _ in range(25)])
        held += low <= 0 <= high
    assert held >= 940


def test_the_interval_of_few_values_is_their_range() -> None:
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert median_interval([2.0]) == (2.0, 2.0)


@pytest.mark.parametrize(("count", "beyond"), [(8, 0), (9, 1), (10, 1), (15, 3), (25, 7), (400, 179)])
def test_the_interval_leaves_out_as_many_values_as_the_binomial_distribution_allows(
    count: int, beyond: int
) -> None:
    low, high = median_interval([float(n) for n in range(count)])
    assert (low, high) == (beyond, count - 1 - beyond)


def test_a_run_against_itself_is_rarely_decided() -> None:
    decided = 0
    for seed in range(200):
        first, again, third = (drawn(1.0, 30, 3 * seed + k) for k in range(3))
        decided += compare(third, first, noise_of(first, again)).verdict in ("faster", "slower")
    assert decided <= 6


@pytest.mark.parametrize(("factor", "verdict"), [(0.8, "faster"), (1.25, "slower")])
def test_clear_differences_are_decided(factor: float, verdict: str) -> None:
    for seed in range(20):
        base, again = drawn(1.0, 40, 3 * seed), drawn(1.0, 40, 3 * seed + 1)
        other = drawn(factor, 40, 3 * seed + 2)
        result = compare(other, base, noise_of(base, again))
        assert result.verdict == verdict
        assert result.low <= result.ratio <= result.high


def test_equal_runs_on_a_quiet_machine_are_a_tie() -> None:
    assert compare([1.0] * 20, [1.0] * 20, noise_of([1.0] * 20, [1.0] * 20)).verdict == "tie"


def test_few_noisy_samples_are_undecided() -> None:
    base, other = [1.0, 1.4, 0.9, 1.2], [0.9, 1.5, 1.0, 0.8]
    assert compare(other, base, 0.01).verdict == "undecided"


def test_a_machine_that_slows_down_meanwhile_does_not_decide() -> None:
    # Both double half-way; samples of one round belong together.
    base = [1.0] * 15 + [2.0] * 15
    assert compare(base, base, 0.01).verdict == "tie"
    assert compare([b * 0.9 for b in base], base, 0.01).verdict == "faster"


class OneCall(Timer):
    """Samples of one call each."""

    def sample(self, run: Run, calls: int = 1, *, pause: bool = True) -> float:
        run()
        return 1.0


def test_runs_alternate_and_have_equally_many_samples() -> None:
    order: list[str] = []
    runs = [lambda name=name: order.append(name) for name in "abc"]
    interleaved = Interleaved(runs, OneCall(CPU), warm_up=1)
    order.clear()
    assert interleaved.sample(10) == 10
    assert [len(s) for s in interleaved.samples] == [10, 10, 10]
    rounds: list[Sequence[str]] = [order[i : i + 3] for i in range(0, 30, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_a_sample_is_taken_in_the_steady_state() -> None:
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        if calls % 40 < 5:  # as if operands and threads came back after another run
            time.sleep(0.003)

    assert Timer(CPU, pause=0.0).sample(run) < 0.001


def test_sampling_ends_at_its_time() -> None:
    ends: list[float] = []

    def run() -> None:
        time.sleep(0.01)
        ends.append(time.monotonic())

    interleaved = Interleaved([run], OneCall(CPU), warm_up=0)
    ends.clear()
    until = time.monotonic() + 0.1
    taken = interleaved.sample(1000, until=until)
    assert taken == len(ends) < 1000
    # No round begins after the time, however long one takes on a busy machine.
    assert all(end < until for end in ends[:-1])
    assert interleaved.sample(1000, until=time.monotonic()) == 0


def test_samples_of_short_calls_are_means() -> None:
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1

    interleaved = Interleaved([run], Timer(CPU), warm_up=0)
    interleaved.sample(5)
    assert calls > 500
    assert spread_of(interleaved.samples[0]).median < 1e-5


def test_peak_memory_of_a_call() -> None:
    size = 64 * 2**20
    peak = peak_bytes(lambda: torch.ones(size // 4).add_(1), CPU)
    if peak is None:
        pytest.skip("this system does not reset the peak of a process")
    assert size * 0.9 <= peak <= size * 2
