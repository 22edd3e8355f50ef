"""XLA: what every such backend must do, and what is its own."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import dovetail
from dovetail.lowering.backend import Compiled, by_name
from dovetail.lowering.backends import xla
from dovetail.lowering.backends.xla import Xla
from dovetail.lowering.lower import lower
from dovetail.outlining.region import Region
from tests.lowering.foreign import ForeignKit
from tests.lowering.foreign_models import whole

pytest.importorskip("torch_mlir")
pytest.importorskip("jaxlib")


class Isolated(Xla):
    isolation = "process"


class Dies(Isolated):
    name = "dies"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        os.abort()


class TestXla(ForeignKit):
    name = "xla"
    isolated = Isolated
    dies = Dies
    share = 1.0


def test_operands_and_results_are_not_copied() -> None:
    x = torch.randn(64, 64)
    runtime = xla._runtime()
    buffer = runtime.given(x.__dlpack__(), xla._client(1).devices()[0], None)
    assert buffer.unsafe_buffer_pointer() == x.data_ptr()
    assert torch.from_dlpack(runtime.taken(buffer)).data_ptr() == x.data_ptr()


def test_another_jaxlib_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxlib import xla_client

    gm = whole(lambda x: torch.relu(x) * 2, torch.ones(3))
    monkeypatch.delattr(xla_client, "make_cpu_client")
    for cached in (xla._runtime, xla._why_no_runtime):
        cached.cache_clear()
    try:
        answer = by_name("xla").supports(dovetail.regions(gm)[0])
        assert isinstance(answer, dovetail.Decline)
        assert answer.reason.startswith("jaxlib ")
        assert "make_cpu_client" in answer.reason
    finally:
        for cached in (xla._runtime, xla._why_no_runtime):
            cached.cache_clear()


def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_NPROC", "7")
    xla._started.cache_clear()
    assert xla._client(1) is xla._client(1)
    assert os.environ["PJRT_NPROC"] == "7"
    monkeypatch.delenv("PJRT_NPROC")
    xla._client(2)
    assert "PJRT_NPROC" not in os.environ


def test_float64_stays_float64() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    gm = whole(lambda x: torch.softmax(x @ x.mT, 1), x)
    with torch.no_grad():
        lowered = lower(gm, by_name("xla"), cache=False, verify=True, on_error="raise")
        torch.testing.assert_close(lowered(x), gm(x), rtol=1e-14, atol=1e-14)
