"""Fusing matches: fake regions that compute the same, lowered ones, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.scheduling.schedule import schedule
from tests.scheduling.models import activation, is_gelu, mlp, net, trained


@pytest.mark.parametrize("training", [True, False])
def test_a_fused_model_computes_the_same(training: bool):
    model, x = net(training=training)
    torch.manual_seed(1)
    expected = model(x)
    s = schedule(model, (x,))
    regions = s.fuse(s["blocks.*"].find(mlp), kind="block.mlp")
    assert [r.kind for r in regions] == ["block.mlp"] * 3
    assert [r.path for r in regions] == ["blocks.0", "blocks.1", "blocks.2"]
    torch.manual_seed(1)
    model, _ = net(training=training)
    s2 = schedule(model, (x,))
    s2.fuse(s2["blocks.*"].find(mlp))
    torch.manual_seed(1)
    assert torch.equal(s2.build()(x), expected)


def test_one_match_gives_a_region_and_a_list_a_list():
    model, x = net()
    s = schedule(model, (x,))
    matches = s["blocks.*"].find(mlp)
    assert s.fuse(matches[0]).name == "mlp_0"
    assert [r.kind for r in s.fuse(matches[1:])] == ["mlp", "mlp"]


def test_matches_from_before_other_steps_are_still_good():
    model, x = net()
    s = schedule(model, (x,))
    matches = s.find(activation)
    names = [s.fuse(match).name for match in matches]
    assert names == ["act_0", "act_1", "act_2"]


def test_a_match_that_was_taken_is_refused_and_nothing_changes():
    model, x = net()
    s = schedule(model, (x,))
    part = s["blocks.0"]
    whole, inner = part.find(mlp), part.find(is_gelu)
    s.fuse(whole)
    before, steps = s.text(), len(s.history)
    with pytest.raises(dovetail.DovetailError, match="region 'mlp_0' has it"):
        s.fuse(inner)
    assert s.text() == before
    assert len(s.history) == steps


def test_siblings_are_fused_together():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x) * self.v(x)

    torch.manual_seed(0)
    model, x = Heads(), torch.randn(2, 4)
    expected = model(x)
    s = schedule(model, (x,))
    region = s.fuse(s.find(nn.Linear), kind="qkv", together=True)
    assert isinstance(region, dovetail.Region)
    assert (len(region.nodes), len(region.outputs)) == (3, 3)
    assert torch.equal(s.build()(x), expected)


def test_what_is_fused_together_is_in_one_graph():
    model, x = net()
    s = schedule(model, (x,))
    before = s.text()
    with pytest.raises(dovetail.DovetailError, match=r"must be in one graph.*blocks.0, blocks.1"):
        s.fuse(s["blocks.*"].find(is_gelu), kind="all", together=True)
    assert s.text() == before


class Odd(nn.Module):
    """Several inputs and results, functions and modules, a list and keyword arguments, values used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor, *, scale: Tensor, parts: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        joined = torch.cat([x, *parts], dim=0)
        shifted = joined * scale
        normed = self.norm(shifted)
        low, high = normed.chunk(2, dim=0)
        return low + high, {"inner": shifted, "high": high.clone()}


def test_any_legal_region():
    model = Odd()
    args = (torch.randn(2, 4),)
    kwargs = {"scale": torch.randn(4), "parts": [torch.randn(2, 4), torch.randn(4, 4)]}
    expected = model(*args, **kwargs)
    s = schedule(model, args, kwargs)
    names = {"mul", "layer_norm", "split"}
    matches = s.find(where=lambda n: n.name.split("_")[0] in {m.split("_")[0] for m in names})
    region = s.fuse(matches, kind="odd", together=True)
    assert len(region.outputs) >= 2
    result = s.build()(*args, **kwargs)
    assert torch.equal(result[0], expected[0])
    assert all(torch.equal(result[1][k], v) for k, v in expected[1].items())


def test_a_region_that_would_be_a_cycle_is_refused():
    class Cycle(nn.Module):
        def forward(self, a: Tensor) -> Tensor:
            x = a + 1
            y = torch.tanh(x)
            return x + y

    s = schedule(Cycle(), (torch.randn(2),))
    matches = s.find(torch.ops.aten.add)
    before = s.text()
    with pytest.raises(dovetail.CyclicRegion, match="tanh"):
        s.fuse(matches, kind="sum", together=True, escapes="output")
    assert s.text() == before


def test_in_place_writes_are_kept():
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.clone()
            y.add_(1)
            z = y * 2
            y.mul_(3)
            return z + y

    x = torch.randn(3)
    expected = Writes()(x)
    s = schedule(Writes(), (x,))
    s.fuse(s.find(torch.ops.aten.mul), kind="products", together=True)
    assert torch.equal(s.build()(x), expected)


def test_a_backend_lowers_at_once():
    model, x = net(training=False)
    expected = model(x)
    s = schedule(model, (x,))
    regions = s.fuse(s["blocks.*"].find(mlp), backends="torchscript")
    assert [r.backend for r in regions] == ["torchscript"] * 3
    torch.testing.assert_close(s.build()(x), expected)


def test_a_backend_of_ones_own_is_called():
    class Mine(dovetail.Backend):
        name = "mine"
        version = "1"
        calls = 0

        def supports(self, region: dovetail.Region) -> bool:
            return True

        def compile(self, region: dovetail.Region, examples: object) -> object:
            def run(*operands: Tensor) -> object:
                Mine.calls += 1
                return region.body(*operands)

            return run

    model, x = net(training=False)
    s = schedule(model, (x,))
    s.fuse(s["blocks.0"].find(mlp), backends=Mine())
    built = s.build()
    Mine.calls = 0
    with torch.no_grad():
        built(x)
    assert Mine.calls == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": "no kind"}, "is not a dotted name"),
        ({"attrs": {"x": object()}}, "attrs"),
        ({"backends": "nobody"}, "nobody"),
        ({"escapes": "perhaps"}, "perhaps"),
    ],
)
def test_bad_options_are_refused_and_nothing_changes(options: dict[str, object], reason: str):
    model, x = net()
    s = schedule(model, (x,))
    matches = s["blocks.0"].find(mlp)
    before = s.text()
    with pytest.raises(dovetail.DovetailError, match=reason):
        s.fuse(matches, **options)
    assert s.text() == before


def test_fuse_takes_matches_of_find():
    model, x = net()
    s = schedule(model, (x,))
    with pytest.raises(dovetail.InvalidArgument, match="fuse takes matches"):
        s.fuse("blocks.0")
    with pytest.raises(dovetail.DovetailError, match=r"nothing to fuse: the list is empty.*LSTM"):
        s.fuse(s["blocks.0"].find(nn.LSTM))


def test_a_scheduled_model_trains_as_the_model_does():
    model, x = net()
    other, _ = net()
    s = schedule(model, (x,))
    s.fuse(s["blocks.*"].find(mlp))
    loss, state = trained(s.build(), x)
    needed, expected = trained(other, x)
    torch.testing.assert_close(loss, needed)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, msg=name)
