"""A module or function in the place of a match, a region, siblings, or a module."""

# pyright: reportUnknownLambdaType=false

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail import zoo
from dovetail.errors import ScheduleError
from dovetail.scheduling.schedule import schedule
from tests.scheduling.models import mlp, net, trained
from tests.scheduling.refusing import refused


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: Any = dovetail.Const()) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / scale + bias, -1), v)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def rms(x: Tensor, w: Tensor, eps: Any = dovetail.Const()) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def rms_module(match: Any) -> nn.RMSNorm:
    return nn.RMSNorm(match["w"].shape[0], eps=match["eps"])


class SplitLinear(nn.Module):
    """Some linear layers of one input."""

    def __init__(self, inputs: int, outputs: list[int], *, bias: bool = True) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(inputs, width, bias=bias) for width in outputs)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x) for part in self.parts)


def bert(**options: Any) -> tuple[nn.Module, zoo.Inputs]:
    entry = zoo.get("bert")
    return entry.build(**options).eval(), entry.example_inputs()


def test_attention_by_hand_becomes_the_operator_in_every_layer() -> None:
    model, inputs = bert()
    expected = model(*inputs.args, **inputs.kwargs)
    s = schedule(model, inputs.args, inputs.kwargs)
    matches = s["layers.*"].find(attention)
    assert len(matches) == 2
    refused(s, "in more than one graph .*replace_all", lambda: s.replace(sdpa, matches))
    assert s.replace_all(matches, lambda _: sdpa, check=True) == ["layers.0.attention", "layers.1.attention"]
    assert not s["layers.*"].find(attention)
    built = s.build()
    torch.testing.assert_close(built(*inputs.args, **inputs.kwargs), expected)
    larger = zoo.get("bert").example_inputs(batch=3)
    ours = built(*larger.args, **larger.kwargs)
    torch.testing.assert_close(ours, s.release()(*larger.args, **larger.kwargs))
    assert s.verify().runs
    s.undo()
    assert len(s["layers.*"].find(attention)) == 2


def test_weights_are_taken_over_by_name() -> None:
    entry = zoo.get("llama")
    model, inputs = entry.build(), entry.example_inputs()
    names = list(model.state_dict())
    expected = model(*inputs.args)
    s = schedule(model, inputs.args)
    part = s["layers.0"]
    match = part.find(rms)[0]
    part.replace(rms_module(match), match, params={"weight": match["w"]}, check=True)
    s["layers.1"].replace_all(rms, rms_module, params={"weight": "w"}, check=True)
    built = s.build()
    torch.testing.assert_close(built(*inputs.args), expected)
    assert list(model.state_dict()) == names
    built(*inputs.args).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    s.verify()
    # Traced as a piece of a larger part, the steps are done there again.
    s.fuse(s.find(torch.ops.aten.silu))
    torch.testing.assert_close(s.build()(*inputs.args), expected)


def test_siblings_become_one_call_and_its_results_are_taken_apart() -> None:
    model, inputs = bert()
    expected = model(*inputs.args, **inputs.kwargs)
    s = schedule(model, inputs.args, inputs.kwargs)
    part = s["layers.0.attention"]
    siblings = part.find(r"^(query|key|value)$")
    width = model.get_submodule("layers.0.attention.query").in_features
    new = SplitLinear(int(width), [int(width)] * 3)  # pyright: ignore[reportArgumentType]
    params = {
        f"parts.{i}.{own}": match[f"{match.module_path.rpartition('.')[2]}_{own}"]
        for i, match in enumerate(siblings)
        for own in ("weight", "bias")
    }
    refused(s, r"result 0 of 'SplitLinear' is off by", lambda: part.replace(new, siblings, check=True))
    part.replace(new, siblings, params=params, check=True)
    torch.testing.assert_close(s.build()(*inputs.args, **inputs.kwargs), expected)
    assert not [name for name in model.state_dict() if "SplitLinear" in name]
    s.fuse(s.find(nn.LayerNorm))
    torch.testing.assert_close(s.build()(*inputs.args, **inputs.kwargs), expected)
    s.release()
    s.undo(2)
    # With weights of its own it is trained and saved with the model.
    part.replace(new, part.find(r"^(query|key|value)$"), name="qkv")
    built = s.build()
    assert "layers.0.attention.qkv.parts.0.weight" in model.state_dict()
    built(*inputs.args, **inputs.kwargs)[0].sum().backward()
    assert all(p.grad is not None for p in new.parameters())
    assert {id(p) for p in new.parameters()} <= {id(p) for p in built.parameters()}


def test_results_in_another_order_are_selected_by_their_numbers() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, None, Tensor]:
            more = x + 1
            return x * 2, None, more

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.two = Two()

        def forward(self, x: Tensor) -> Tensor:
            double, _, more = self.two(x)
            return double.exp() - more

    model, x = Around(), torch.randn(3)
    expected = model(x)
    s = schedule(model, (x,))
    s.fuse(s.find(torch.ops.aten.exp))
    s.replace(lambda x: (x * 2, None, x + 1), "two")
    assert torch.equal(s.build()(x), expected)
    refused(s, "returns 1 values, and what it replaces returns 2", lambda: s.replace(torch.exp, "two"))


def test_a_module_at_a_path() -> None:
    model, x = net(training=False)
    expected, names = model(x), list(model.state_dict())
    s = schedule(model, (x,))
    new = nn.LayerNorm(8)
    s.replace(new, "blocks.0.norm", params={"weight": "weight", "bias": "blocks.0.norm.bias"}, check=True)
    built = s.build()
    assert torch.equal(built(x), expected)
    assert list(model.state_dict()) == names
    assert built.get_submodule("blocks.0.norm") is new
    assert not new.training
    assert s.release().get_submodule("blocks.0.norm") is not new
    # Around it other steps are done.
    block = s["blocks.0"]
    block.fuse(block.find(mlp))
    assert torch.equal(s.build()(x), expected)


def test_a_module_in_a_traced_part_every_call_of_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line, self.act = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.line(self.act(x)))

    model, x = Twice(), torch.randn(3, 4)
    s = schedule(model, (x,))
    s.fuse(s.find(nn.Linear))
    s.replace(nn.PReLU(), "act")
    assert [str(n.target) for n in s.graph.graph.nodes].count("aten.relu.default") == 0
    built = s.build()
    assert [name for name, _ in built.named_parameters()] == ["line.weight", "line.bias", "PReLU.weight"]
    act = nn.PReLU()
    torch.testing.assert_close(built(x), act(model.line(act(x))))


def test_a_region_is_replaced_and_what_is_around_it_is_fused() -> None:
    model, x = net(training=False)
    expected = model(x)
    s = schedule(model, (x,))
    block = s["blocks.0"]
    region = block.fuse(block.find(mlp), kind="mlp")[0]
    before = s.text()
    s.replace(mlp, region, check=True)
    assert not block.regions
    whole = block.fuse(
        block.find(where=lambda node: node.op in ("call_function", "call_module")), together=True
    )
    assert "replaced_0" not in {n.name for n in block.graph.graph.nodes}
    assert not whole.effects
    assert torch.equal(s.build()(x), expected)
    s.undo(2)
    assert s.text() == before


def test_arguments_by_name_by_order_and_fixed() -> None:
    model, x = net(training=False)
    expected = model(x)
    s = schedule(model, (x,))
    block = s["blocks.0"]

    def turned(c: Tensor, v: Tensor, b: Tensor, w: Tensor, x: Tensor) -> Tensor:
        return mlp(x, w, b, v, c)

    def only(*, x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor, factor: float = 1.0) -> Tensor:
        return mlp(x, w, b, v, c) * factor

    def anything(*values: Tensor) -> Tensor:
        return mlp(*values)

    def others(one: Tensor, two: Tensor, three: Tensor, four: Tensor, five: Tensor, six: float) -> Tensor:
        return mlp(one, two, three, four, five) * six

    for new, fixed in (
        (turned, {}),
        (only, {}),
        (only, {"factor": 1.0}),
        (anything, {}),
        (others, {"six": 1.0}),
    ):
        s.replace(new, block.find(mlp)[0], concrete_args=fixed, check=True)
        torch.testing.assert_close(s.build()(x), expected)
        s.release()
        s.undo()
    refused(
        s, "missing a required argument: 'six'.*concrete_args", lambda: s.replace(others, block.find(mlp)[0])
    )


def test_captured_literals_are_given_by_name() -> None:
    model, x = net(training=False)
    seen: list[float] = []

    def scaled(x: Tensor, factor: Any = dovetail.Const()) -> Tensor:
        return x * factor

    def new(x: Tensor, factor: float) -> Tensor:
        seen.append(factor)
        return x * factor

    wrapped = nn.Sequential(model, _Times(3.0))
    s = schedule(wrapped, (x,))
    s.replace(new, s["1"].find(scaled), check=True)
    assert seen == [3.0]


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_replaced_match_trains_and_follows_the_mode_of_the_model() -> None:
    model, x = net()
    reference, state = trained(copy.deepcopy(model), x)
    s = schedule(model, (x,))
    block = s["blocks.0"]
    stats = block.find(nn.BatchNorm1d)[0]
    own = {"weight": "stats_weight", "bias": "stats_bias"}
    own |= {f: f"stats_{f}" for f in ("running_mean", "running_var", "num_batches_tracked")}
    new = nn.Sequential(nn.Identity(), nn.BatchNorm1d(8))
    block.replace(new, stats, params={f"1.{name}": value for name, value in own.items()}, check=True)
    loss, ours = trained(s.build(), x)
    torch.testing.assert_close(loss, reference)
    torch.testing.assert_close(ours, state)
    assert new.training
    model.eval()
    assert not new.training
    s.release()
    assert new[1].weight is not None


def test_a_copy_of_a_built_model_has_its_own() -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    s["blocks.0"].replace(nn.LayerNorm(8), s["blocks.0"].find(nn.LayerNorm), name="new")
    built = s.build()
    before = built(x)
    twin = copy.deepcopy(built)
    with torch.no_grad():
        twin.get_parameter("blocks.0.new.weight").zero_()
    assert not torch.equal(twin(x), before)
    assert torch.equal(built(x), before)


def test_every_module_of_a_class_and_none_that_was_just_created() -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model, x = net(training=False)
    expected = model(x)
    s = schedule(model, (x,))
    block = s["blocks.2"]
    block.fuse(block.find(torch.ops.aten.gelu))
    paths = s.replace_all(nn.Linear, Wrapped, check=True)
    assert paths == [*(f"blocks.{i}.{name}" for i in range(3) for name in ("up", "down")), "head"]
    assert type(s["blocks.0.up"].modules[0]) is Wrapped
    assert not block.find(torch.ops.aten.linear)
    torch.testing.assert_close(s.build()(x), expected)
    s.release()
    refused(s, "no module of class Conv2d is in the model", lambda: s.replace_all(nn.Conv2d, Wrapped))
    refused(s, "does not take what 'head'|is float32", lambda: s["head"].replace_all(Wrapped, lambda _: nn.Linear(8, 3)))  # fmt: skip


def test_history_replays_what_was_replaced() -> None:
    entry = zoo.get("llama")
    model, inputs = entry.build().eval(), entry.example_inputs()
    s = schedule(model, inputs.args)
    s["layers.*"].replace_all(rms, rms_module, params={"weight": "w"})
    s.replace(F.silu, s["layers.0"].find(torch.ops.aten.silu))
    other = entry.build().eval()
    again = schedule(other).replay(s.history.json())
    assert [step["do"] for step in again.history] == ["schedule", "replace_all", "replace"]
    assert not again["layers.*"].find(rms)
    torch.testing.assert_close(again.build()(*inputs.args), model(*inputs.args))


def test_what_a_replacement_does_is_known_from_trying_it() -> None:
    def around(new: Any) -> tuple[str, ...]:
        model, x = net(training=False)
        s = schedule(model, (x,))
        block = s["blocks.0"]
        block.replace(new, block.find(torch.ops.aten.gelu)[0])
        return block.fuse(block.find(where=lambda n: n.op == "call_module"), kind="new")[0].effects

    assert around(F.gelu) == ()
    assert around(lambda x: x * torch.rand(1)) == ("random",)
    # In the mode it is in it draws nothing; in the other it would.
    assert around(nn.Dropout(0.5)) == ("random",)
    assert "writes" in around(nn.BatchNorm1d(8))


def test_a_tracer_sees_through_what_was_replaced() -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    s["blocks.0"].replace(nn.LayerNorm(8), s["blocks.0"].find(nn.LayerNorm), params={"weight": "norm_weight"})
    built = s.build()
    expected = built(x)
    torch.testing.assert_close(torch.compile(built, backend="eager")(x), expected)
    torch.testing.assert_close(dovetail.capture(built, (x,))(x), expected)


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.total.add_(self.total)


def test_a_look_at_what_is_replaced_leaves_buffers_of_earlier_replacements_alone() -> None:
    model, x = nn.Sequential(nn.ReLU(), Doubling()), torch.randn(2, 3)
    expected = copy.deepcopy(model)(x)
    s = schedule(model, (x,))
    new = copy.deepcopy(model[1])
    s["1"].replace(new, check=False)
    s.replace_all(torch.ops.aten.relu.default, lambda match: torch.relu, check=False)
    assert torch.equal(new.total, torch.ones(3))
    assert torch.equal(s.build()(x), expected)


class Writes(nn.Module):
    """Changes all that a module can own whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.unseen = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(3))
        self.table = torch.zeros(3)
        self.generator = torch.Generator()
        self.calls = 0
        self.log: list[int] = []
        self.inner = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.add_(1)
            self.unseen.data.add_(1)
            self.count.add_(1)
            self.table.add_(1)
        self.calls += 1
        self.log.append(self.calls)
        return self.inner(x) * torch.rand(3, generator=self.generator)

    def owned(self) -> list[Any]:
        tensors = (self.weight, self.unseen, self.count, self.table)
        stream = self.generator.get_state().tolist()
        return [*(t.tolist() for t in tensors), stream, self.calls, list(self.log)]


@pytest.mark.parametrize("check", [False, True])
def test_trial_runs_leave_no_trace_in_the_model(check: bool) -> None:
    model = nn.Sequential(Writes(), nn.Dropout(0.5))
    before = model[0].owned()
    s = schedule(model, (torch.linspace(-1, 1, 3),))
    s["0.inner"].replace(nn.Tanh(), check=check)
    s["1"].replace(nn.Dropout(0.5), check=check)
    s.verify()
    assert model[0].owned() == before
    s.build()
    model(torch.ones(3))
    assert model[0].calls == 1
    assert model[0].weight.tolist() == [2, 2, 2]


def test_a_replacement_that_is_refused_keeps_its_state() -> None:
    new = Writes()
    before = new.owned()
    model = nn.Sequential(nn.Linear(3, 4))
    s = schedule(model, (torch.ones(3),))
    with pytest.raises(ScheduleError, match=r"float32\[3\]"):
        s["0"].replace(new)
    assert new.owned() == before
