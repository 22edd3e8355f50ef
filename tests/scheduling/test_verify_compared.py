"""What verifying compares: gradients, inputs that are written, results by their place, and by which measure."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.errors import InvalidArgument, VerificationError
from dovetail.lowering.backend_protocol import Backend
from dovetail.scheduling.schedule import schedule

from .models import Net, mlp, net
from .replacements import copied, on_gelu, right, wrong, wrong_gradient


def test_without_gradients_the_rest_is_compared() -> None:
    model, x = net(training=False)
    s = schedule(model.requires_grad_(False), (x,))
    s.fuse(s["blocks.0"].find(mlp))
    verdict = s.verify()
    assert verdict.gradients == 0
    assert "  not compared: gradients: nothing requires them" in str(verdict)
    on_gelu(s, wrong)
    with pytest.raises(VerificationError, match="result 0"):
        s.verify()


def test_gradients_of_inputs_are_compared() -> None:
    model, x = net(training=False)
    s = schedule(model.requires_grad_(False), (x.requires_grad_(),))
    s.fuse(s["blocks.0"].find(mlp))
    assert s.verify().gradients == 1
    on_gelu(s, wrong_gradient)
    with pytest.raises(VerificationError) as raised:
        s.verify()
    assert raised.value.what == "the gradient of input 0"


def doubled(x: Tensor) -> Tensor:
    return (x + 1) * 2


class Writing(nn.Module):
    """Writes its input."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2


def test_inputs_that_are_written_are_compared() -> None:
    s = schedule(nn.Sequential(Writing()), (torch.zeros(3),))
    s["0"].replace(doubled)
    with pytest.raises(VerificationError) as raised:
        s.verify()
    assert raised.value.what == "input 0 afterwards"


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        result = self.inner(x)
        return {"top": result.argmax(-1), "all": [result, 3]}


def test_results_are_named_by_their_place() -> None:
    s = schedule(Named(), (torch.randn(2, 3),))
    s["inner"].replace(nn.Linear(3, 3))
    with pytest.raises(VerificationError) as raised:
        s.verify(fresh=3)
    assert raised.value.what in ("result 0 (['all'][0])", "result 1 (['all'][0])", "result 0 (['top'])")


def test_replaced_weights_are_compared_by_name_and_what_is_gone_is_reported() -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    s["head"].replace(copied(model.head))
    assert s.verify().gradients == 26
    matches = s["blocks.1"].find(torch.ops.aten.linear.default)[0]
    s.replace(copied(model.get_submodule("blocks.1.up")), matches)
    verdict = s.verify()
    assert verdict.gradients == 24
    assert verdict.notes == (
        "the gradient of 'blocks.1.up.weight': it was replaced",
        "the gradient of 'blocks.1.up.bias': it was replaced",
    )


def test_statistics_that_are_gathered_otherwise_are_detected() -> None:
    model, x = net()
    s = schedule(model, (x,))
    s.checkpoint("blocks.0.up")
    assert s.verify().runs == 2
    quick = nn.BatchNorm1d(8, momentum=0.5)
    s.replace(quick, "blocks.1.stats")
    with pytest.raises(VerificationError, match=r"by step 2 \(replace .*'blocks.1.stats'\)") as raised:
        s.verify()
    assert raised.value.what.startswith("buffer 'blocks.1.stats.")


def test_gradients_that_cancel_are_judged_by_the_noise_they_consist_of() -> None:
    torch.manual_seed(4)
    model, x = Net(), torch.randn(4, 8)
    s = schedule(model, (x,))
    for block in range(3):
        on_gelu(s, right, block)
    assert 0 < s.verify(fresh=6).error < 1e-5
    s.undo()
    on_gelu(s, wrong_gradient, 2)
    with pytest.raises(VerificationError, match=r"by step 3 \(replace wrong_gradient"):
        s.verify()


class Rough(Backend):
    """Off by a little, and says so; its code is for calls without gradients."""

    name = "rough"
    bound = 0.02

    def __init__(self, error: float) -> None:
        self.error = error
        self.version = str(error)

    def supports(self, region: Any) -> Any:
        return True

    def compile(self, region: Any, examples: Any) -> Any:
        def run(*operands: Any) -> Any:
            return tuple(v * (1 + self.error) for v in region.body(*operands))

        return run


@pytest.mark.parametrize(("error", "is_right"), [(0.01, True), (0.05, False)])
def test_a_backend_with_a_bound_is_judged_by_it(error: float, is_right: bool) -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.fuse(s["head"].find(torch.ops.aten.linear.default), backends=Rough(error))
    if is_right:
        verdict = s.verify()
        assert (verdict.runs, round(verdict.error, 3)) == (4, error)
        return
    with pytest.raises(VerificationError, match=r"without gradients, result 0 is off by 5.00% of its size"):
        s.verify()


@pytest.mark.parametrize("options", [{"fresh": -1}, {"fresh": True}, {"train": 1}])
def test_options_are_checked(options: dict[str, Any]) -> None:
    model, x = net()
    with pytest.raises(InvalidArgument):
        schedule(model, (x,)).verify(**options)


def test_inputs_are_needed() -> None:
    with pytest.raises(InvalidArgument, match="example inputs"):
        schedule(net()[0]).verify()
