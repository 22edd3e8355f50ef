"""XLA: what every such backend must do, and what is its own."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.backends.external import xla
from dovetail.backends.external.xla import Xla
from dovetail.lowering.backend_protocol import Compiled, by_name
from dovetail.lowering.lower import lower
from dovetail.outlining.region import Region
from tests.backends.external import ExternalBackendTests
from tests.backends.external_models import whole

pytest.importorskip("torch_mlir")
pytest.importorskip("jaxlib")


class Isolated(Xla):
    isolation = "process"


class Dies(Isolated):
    name = "dies"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        os.abort()


class TestXla(ExternalBackendTests):
    name = "xla"
    isolated = Isolated
    dies = Dies
    share = 1.0


# The client is started once in a process, and its buffers are nowhere but in it: these tests ask for it directly.


def test_operands_and_results_are_not_copied() -> None:
    x = torch.randn(64, 64)
    runtime = xla._runtime()
    buffer = runtime.from_dlpack(x.__dlpack__(), xla._client(1).devices()[0], None)
    assert buffer.unsafe_buffer_pointer() == x.data_ptr()
    assert torch.from_dlpack(runtime.to_dlpack(buffer)).data_ptr() == x.data_ptr()


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
    xla._start_client.cache_clear()
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


def compiled_result(function: Any, *args: torch.Tensor) -> Any:
    """What the code of one region gives; None where the region is declined."""
    gm = whole(function, *args)
    (region,) = dovetail.regions(gm)
    if by_name("xla").supports(region) is not True:
        return None
    with torch.no_grad():
        return lower(gm, by_name("xla"), cache=False, on_error="raise", grad=False, smallest=1)(*args)


WILD = torch.tensor([0.5, float("nan"), float("inf"), -float("inf"), -95.0, 0.3, float("nan"), -150.0, 7.0])


@pytest.mark.parametrize(
    "function",
    [
        F.logsigmoid,
        lambda x: x.argmax(),
        lambda x: x.reshape(3, 3).argmin(1, keepdim=True),
        lambda x: torch.topk(x, 3).values,
        lambda x: torch.sort(-x).values,
        lambda x: torch.sort(x, descending=True).values,
        lambda x: x.pow(0.5),
        lambda x: torch.lerp(x, x.flip(0), 0.8),
        lambda x: F.rms_norm(x[-2:] * 1e-6, (2,)),
        lambda x: F.cosine_similarity(x[:1] * 1e-3, x[-1:] * 1e3, 0, 0.1),
    ],
    ids=["logsigmoid", "argmax", "argmin", "topk", "sort", "down", "root", "lerp", "rms", "cosine"],
)
def test_what_torch_mlir_gets_wrong_is_mended(function: Any) -> None:
    torch.testing.assert_close(compiled_result(function, WILD.clone()), function(WILD), equal_nan=True)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "size", "dilation"),
    [(2, 2, 0, 5, 1), (3, 2, 0, 6, 1), (3, 2, 1, 6, 1), (3, 3, 0, 8, 1), (3, 2, 1, 9, 2), (2, 3, 1, 7, 1)],
)
def test_a_last_window_that_is_not_full(
    kernel: int, stride: int, padding: int, size: int, dilation: int
) -> None:
    def pooled(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode=True)

    x = torch.randn(2, 3, size, size + 1) - 5
    x[0, 0, 2, 2] = float("nan")
    torch.testing.assert_close(compiled_result(pooled, x), pooled(x), equal_nan=True)
    whole_numbers = torch.arange(size * size).reshape(1, size, size) - 500
    assert torch.equal(compiled_result(pooled, whole_numbers), pooled(whole_numbers))


@pytest.mark.parametrize("alpha", [1, 2.5])
def test_what_is_taken_zero_times_is_left_out(alpha: float) -> None:
    lost, a, b = torch.full((3, 5), torch.nan), torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    for function, x, y in ((torch.addmm, a[0].clone(), b[0].clone()), (torch.baddbmm, a, b)):
        run = lambda i, x, y, f=function: f(i, x, y, beta=0, alpha=alpha)  # noqa: E731
        torch.testing.assert_close(compiled_result(run, lost, x, y), run(lost, x, y))


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (F.linear, (torch.randn(2, 4).double(), torch.randn(3, 4), torch.randn(3))),
        (torch.mv, (torch.randn(3, 4), torch.randn(4).double())),
        (lambda x, w: F.layer_norm(x, (4,), w), (torch.randn(2, 4).double(), torch.randn(4))),
        (lambda x: x == x, (WILD,)),
        (lambda x: torch.var(x, correction=10), (WILD,)),
        (lambda x: x.amax(), (torch.tensor([3, 200], dtype=torch.uint8),)),
        (lambda x: x.any(), (torch.tensor([3, 200], dtype=torch.uint8),)),
        (lambda x, a, b: torch.addmm(x, a, b, alpha=0), (torch.ones(2, 2),) * 3),
    ],
    ids=["linear", "mv", "norm", "itself", "correction", "amax", "any", "alpha"],
)
def test_arguments_that_it_gets_wrong_are_declined(function: Any, args: tuple[torch.Tensor, ...]) -> None:
    assert compiled_result(function, *(a.clone() for a in args)) is None


def test_bytes_have_no_sign() -> None:
    x = torch.tensor([3, 200, 7, 130], dtype=torch.uint8)

    def compared(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x < 7, x > x.flip(0), x.masked_fill(x > 150, 1), torch.sign(x), torch.topk(x, 2).values

    for got, expected in zip(compiled_result(compared, x), compared(x), strict=True):
        assert torch.equal(got, expected)
