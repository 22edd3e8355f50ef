"""Products in int8: in float32 until calibrated, then really in integers, and close; what is no product is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail.backends.int8 import int8_backend
from dovetail.backends.int8.int8_backend import Int8
from dovetail.errors import InvalidArgument
from dovetail.zoo import bert, resnet
from tests.backends.int8_helpers import Images, Layers, integers, lowered, needs_int8, off, reasons

pytestmark = needs_int8

X, IMAGE = torch.randn(6, 5, 32), torch.randn(2, 3, 16, 16)


class Step(nn.Module):
    """Any function of a value and weights that are parameters."""

    def __init__(self, function: Callable[..., Tensor], *weights: Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) / 4 for shape in shapes]


@dataclass(frozen=True, eq=False)
class Form:
    """A function of a value and weights, and the kind of region that it is, or why it is refused."""

    function: Callable[..., Any]
    given: list[Tensor]
    x: Tensor
    expected: str

    def model(self) -> Step:
        return Step(self.function, *self.given)


W, WT, B = weights((24, 32), (32, 24), (24,))
KERNEL, BIAS = weights((8, 3, 3, 3), (8,))

FORMS = {
    "linear": Form(F.linear, [W, B], X, "linear"),
    "no bias": Form(F.linear, [W], X, "linear"),
    "relu": Form(lambda x, w, b: torch.relu(F.linear(x, w, b)), [W, B], X, "linear_activation"),
    "gelu": Form(lambda x, w, b: F.gelu(F.linear(x, w, b)), [W, B], X, "linear_activation"),
    "gelu_tanh": Form(
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        [W, B],
        X,
        "linear_activation",
    ),
    "silu": Form(lambda x, w: F.silu(F.linear(x, w)), [W], X, "linear_activation"),
    "residual": Form(lambda x, w: F.linear(x, w) + x, weights((32, 32)), X, "linear_residual"),
    "residual elsewhere": Form(
        lambda x, w: F.linear(x, w) + x.mT.contiguous().mT * 2, weights((32, 32)), X, "linear_residual"
    ),
    "transposed": Form(lambda x, w: torch.relu(x @ w.T), [W], X, "linear_activation"),
    "turned": Form(lambda x, w: torch.tanh(x @ w), [WT], X, "linear_activation"),
    "addmm": Form(lambda x, w, b: torch.relu(torch.addmm(b, x, w)), [WT, B], X[0], "linear_activation"),
    "swiglu": Form(
        lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v),
        weights((24, 32), (24, 32)),
        X,
        "swiglu",
    ),
    "conv": Form(lambda x, w, b: F.conv2d(x, w, b, 2, 1), [KERNEL, BIAS], IMAGE, "conv"),
    "conv relu": Form(lambda x, w, b: torch.relu(F.conv2d(x, w, b)), [KERNEL, BIAS], IMAGE, "conv_bn_act"),
    "conv same": Form(
        lambda x, w: torch.relu(F.conv2d(x, w, padding="same")),
        [KERNEL],
        IMAGE,
        "conv_bn_act",
    ),
    "conv1d": Form(lambda x, w: torch.relu(F.conv1d(x, w, dilation=2)), weights((8, 5, 3)), X, "conv_bn_act"),
    "conv3d": Form(
        lambda x, w: torch.relu(F.conv3d(x, w)),
        weights((8, 3, 3, 3, 3)),
        torch.randn(2, 3, 6, 6, 6),
        "conv_bn_act",
    ),
    "groups": Form(
        lambda x, w: torch.relu(F.conv2d(x, w, groups=4)),
        weights((8, 2, 3, 3)),
        torch.randn(2, 8, 9, 9),
        "conv_bn_act",
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_a_product_runs_in_float32_until_it_is_calibrated_and_then_in_integers(form: str) -> None:
    x, kind = FORMS[form].x, FORMS[form].expected
    model = FORMS[form].model().eval()
    expected = model(x)
    fast = lowered(model, x, on_error="raise", verify=True)
    (region,) = dovetail.regions(fast)
    assert (region.kind, region.backend) == (kind, "int8")
    products = 2 if form == "swiglu" else 1
    for _ in range(2):
        assert torch.equal(fast(x), expected)
    result = fast(x)
    assert integers(fast, x) == products
    assert 0 < off(result, expected) < 0.02
    assert (result.stride(), result.dtype) == (expected.stride(), expected.dtype)
    assert torch.equal(fast(x), result)


@torch.no_grad()
def test_a_batch_norm_is_folded_and_its_statistics_are_watched() -> None:
    model = Images().eval()
    fast = lowered(model, IMAGE, on_error="raise", verify=True)
    assert [r.kind for r in dovetail.regions(fast)] == ["conv_bn_act"] * 2
    for _ in range(2):
        assert torch.equal(fast(IMAGE), model(IMAGE))
    assert integers(fast, IMAGE) == 2
    assert off(fast(IMAGE), model(IMAGE)) < 0.02
    model.norms[1].get_buffer("running_mean").add_(3)
    for _ in range(2):
        fast(IMAGE)
    assert off(fast(IMAGE), model(IMAGE)) < 0.02
    assert integers(fast, IMAGE) == 2


@torch.no_grad()
def test_images_with_channels_last_stay_so() -> None:
    model = Images().eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = IMAGE.to(memory_format=torch.channels_last)
    fast = lowered(model, x, on_error="raise")
    for _ in range(2):
        fast(x)
    result = fast(x)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert integers(fast, x) == 2
    assert off(result, model(x)) < 0.02


REFUSED = {
    "dtype": Form(F.linear, [W.bfloat16()], X.bfloat16(), "is torch.bfloat16, and int8 replaces float32"),
    "two values": Form(
        lambda x: x.relu() @ x.tanh().mT,
        [],
        X[0],
        "multiplies two values of which none is a weight",
    ),
    "computed": Form(
        lambda x, w: F.linear(x, w * 2),
        [W],
        X,
        "multiplies two values of which none is a weight",
    ),
    "no product": Form(lambda x: torch.relu(x) + 1, [], X, "it has no product with weights"),
    "more": Form(
        lambda x, w: torch.softmax(F.linear(x, w), -1),
        [W],
        X,
        "(softmax) is not an elementwise operation or view beside a product",
    ),
    "transposed": Form(
        lambda x, w: F.conv_transpose2d(x, w),
        weights((3, 8, 3, 3)),
        IMAGE,
        "(conv_transpose2d) is not an elementwise operation or view beside a product",
    ),
    "no batch": Form(F.conv2d, [KERNEL], IMAGE[0], "has no batch dimension"),
    "vector": Form(F.linear, [W], X[0, 0], "is a product of one vector"),
    "batch statistics": Form(
        lambda x, w, b: F.batch_norm(F.conv2d(x, w, b), None, None, training=True),
        [KERNEL, BIAS],
        IMAGE,
        "uses the statistics of the batch; capture the model in eval mode",
    ),
    "draws": Form(lambda x, w: F.dropout(F.linear(x, w), 0.5), [W], X, "it has effects (random)"),
}


@torch.no_grad()
@pytest.mark.parametrize("form", REFUSED)
def test_what_cannot_run_in_integers_is_declined_with_the_reason(form: str) -> None:
    x, reason, model = REFUSED[form].x, REFUSED[form].expected, REFUSED[form].model()
    model = model.train() if form == "draws" else model.eval()
    graph = dovetail.capture(model, (x,))
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    fast = dovetail.lower(dovetail.outline(graph, calls, kind="whole"), ["int8"])
    assert dovetail.regions(fast)[0].backend is None
    (expected,) = reasons(fast, "supports")
    assert reason in expected
    if form != "draws":
        assert torch.equal(fast(x), model(x))


def test_another_machine_declines_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_backend, "why_not_here", lambda: "this processor has no VNNI")
    fast = lowered(Layers().eval(), X)
    assert set(reasons(fast, "supports")) == {"this processor has no VNNI"}
    assert integers(fast, X) == 0


@torch.no_grad()
def test_weights_that_are_inputs_stay_in_float32() -> None:
    fast = dovetail.lower(
        dovetail.fuse(dovetail.capture(F.linear, (X, W)), Int8().rules), [Int8(calibrate=1)]
    )
    for _ in range(3):
        assert torch.equal(fast(X, W), F.linear(X, W))
    assert reasons(fast, "prepare") == [
        "stays in float32: its operand 1 is a weight, but not a parameter or constant"
    ]


def test_it_does_not_train() -> None:
    model = Layers().eval()
    fast = lowered(model, X, backend=Int8(calibrate=1))
    with torch.no_grad():
        fast(X)
        assert integers(fast, X) == 2
    assert integers(fast, X) == 0
    fast(X).sum().backward()
    assert model.up.weight.grad is not None
    assert "gradients" in {e.outcome for e in dovetail.explain(fast).lowered}


@torch.no_grad()
@pytest.mark.parametrize("zoo", [resnet, bert])
def test_a_model_of_the_zoo_compiled(zoo: Any) -> None:
    model, given = zoo.build("tiny").eval(), zoo.example_inputs("tiny")
    others = [zoo.example_inputs("tiny", seed=seed) for seed in (1, 2)]
    samples = [(*s.args, *s.kwargs.values()) for s in others]
    args = (*given.args, *given.kwargs.values())
    fast = dovetail.compile(model, args, backends=[Int8(samples), "eager"])
    kinds = {r.kind: r.backend for r in dovetail.regions(fast.graphs[0], nested=True)}
    assert kinds["linear"] == "int8"
    assert kinds["rest"] == "eager"
    products = sum(isinstance(m, nn.Linear | nn.Conv2d) for m in model.modules())
    assert integers(fast, *args) == products
    result, expected = fast(*args), model(*args)
    result, expected = (v[0] if isinstance(v, tuple) else v for v in (result, expected))
    assert off(result, expected) < 0.02


@torch.no_grad()
def test_by_name_and_by_kind() -> None:
    model = Layers().eval()
    graph = dovetail.fuse(dovetail.capture(model, (X,)), Int8().rules)
    fast = dovetail.lower(graph, {"linear_residual": "int8"})
    assert [r.backend for r in dovetail.regions(fast)] == [None, "int8"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"calibrate": 0}, "calibrate 0; give the number of calls"),
        ({"bound": -1.0}, "bound -1.0; give a relative error"),
        ({"calibration": X}, "give an iterable of sample inputs"),
    ],
)
def test_options_that_are_none_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        Int8(**options)
