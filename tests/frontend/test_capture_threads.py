"""Random generators in forward while other threads are there: those that may draw, and those that do not."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from tests.frontend.test_side_effects import (
    Forward,
    _forks,
    _goes_back,
    _seeds,
    _seeds_default,
    matrix,
    model_of,
)


@pytest.fixture
def drawing() -> Iterator[list[Tensor]]:
    """Another thread that is alive; it draws what a test asks for."""
    wake, drawn = threading.Event(), list[Tensor]()
    thread = threading.Thread(target=lambda: wake.wait() and drawn.append(torch.rand(5)))
    thread.start()
    _DRAWING.append((wake, thread))
    yield drawn
    wake.set()
    thread.join()
    _DRAWING.clear()


_DRAWING: list[tuple[threading.Event, threading.Thread]] = []


@pytest.mark.usefixtures("drawing")
@pytest.mark.parametrize("forward", [_seeds, _seeds_default, _forks])
def test_seeding_is_refused_while_other_threads_run(forward: Forward) -> None:
    model = model_of(forward)
    stream = torch.manual_seed(3).get_state()
    with pytest.raises(dovetail.CaptureError, match="seeds a random generator"):
        dovetail.capture(model, (matrix(),))
    assert torch.equal(torch.get_rng_state(), stream)


@pytest.mark.parametrize("forward", [_seeds_default, _goes_back])
def test_a_progress_monitor_draws_nothing(forward: Forward) -> None:
    monitors = pytest.importorskip("tqdm._monitor")
    monitor = monitors.TMonitor(pytest.importorskip("tqdm").tqdm, 60)
    try:
        model = model_of(forward)
        torch.manual_seed(0)
        with pytest.raises(dovetail.CaptureError, match="seeds a random generator"):
            dovetail.capture(model, (matrix(),))
    finally:
        monitor.exit()


@pytest.mark.parametrize("forward", [_seeds_default, _goes_back])
def test_an_executor_without_tasks_draws_nothing(forward: Forward) -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()
        model = model_of(forward)
        torch.manual_seed(0)
        with pytest.raises(dovetail.CaptureError, match="seeds a random generator"):
            dovetail.capture(model, (matrix(),))


@pytest.mark.parametrize("forward", [_seeds_default, _goes_back])
def test_what_feeds_a_queue_draws_nothing(forward: Forward) -> None:
    queue: Any = multiprocessing.Queue()
    try:
        queue.put(0)
        model = model_of(forward)
        torch.manual_seed(0)
        with pytest.raises(dovetail.CaptureError, match="seeds a random generator"):
            dovetail.capture(model, (matrix(),))
    finally:
        queue.get()
        queue.close()
        queue.join_thread()


def test_another_thread_draws_its_own_numbers_during_capture(drawing: list[Tensor]) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        wake, thread = _DRAWING[0]
        wake.set()
        thread.join()
        return x + torch.rand(6, 8)

    torch.manual_seed(7)
    want = torch.rand(5)
    model = model_of(forward)
    torch.manual_seed(7)
    assert dovetail.capture(model, (matrix(),)) is not None
    assert torch.equal(drawing[0], want)
    assert torch.initial_seed() == 7
