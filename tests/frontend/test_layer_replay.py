"""Repeated layers are traced twice and then copied: the graph is that of a full trace, or the layers are traced."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dovetail
from dovetail import config, zoo

from .replayed import DEPTH, Layer, Replays, Stack, check


def test_two_layers_are_traced_and_the_others_copied(
    replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(Stack(), (torch.randn(3, 8),), replays, monkeypatch) == DEPTH - 2


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_the_model(training: bool, replays: Replays) -> None:
    model = Stack().train(training)
    x = torch.randn(3, 8, requires_grad=True)
    gm = dovetail.capture(model, (x,))
    assert replays.count == DEPTH - 2
    wanted = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    for a, b in zip(torch.autograd.grad(gm(x).sum(), [x, *model.parameters()]), wanted, strict=True):
        assert torch.equal(a, b)


def test_every_layer_is_traced_if_that_is_set(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.replay_layers
    monkeypatch.setattr(config, "replay_layers", False)
    dovetail.capture(Stack(), (torch.randn(3, 8),))
    assert replays.instances == []


class ReadsIndex(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (self.layer_idx + 1)


class Alternates(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.kind = "relu" if index % 2 else "tanh"

    def forward(self, x: Tensor) -> Any:
        return super().forward(torch.relu(x) if self.kind == "relu" else torch.tanh(x))


class ReadsOnlyOnce(Layer):
    """The first layers do not reach the attribute."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        y = super().forward(x)
        if x.shape[0] > 3:
            return y * self.layer_idx
        return y


class Counts(Layer):
    """Depends on state that is not an attribute."""

    calls: ClassVar[list[int]] = []

    def forward(self, x: Tensor) -> Any:
        Counts.calls.append(1)
        return super().forward(x) * len(Counts.calls)


class WritesInput(Layer):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        y.mul_(2)
        return y.add_(1)


class WritesItself(nn.Module):
    """Writes its result in place, as residual blocks of images do."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.linear(x)), inplace=True)
        y += x
        return functional.relu(y, inplace=True)


class ReturnsInput(Layer):
    def forward(self, x: Tensor) -> Any:
        super().forward(x)
        return x


class ReturnsView(Layer):
    def forward(self, x: Tensor) -> Any:
        return x.view(-1, 8)


class HasConstant(Layer):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + torch.tensor([1.0, 2.0] * 4)


class WithoutGradients(Layer):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            y = super().forward(x)
        return y + x


class Dropping(Layer):
    def forward(self, x: Tensor) -> Any:
        return functional.dropout(super().forward(x), 0.5, self.training)


class Normalizing(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(x)))


class AssignsBuffer(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.total = self.total + y.detach().sum(0)
        return y


class ReadsNumber(Layer):
    def forward(self, x: Tensor, number: Any = None) -> Any:
        return super().forward(x) * int(number)


class PassesNumbers(Stack):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            x = layer(x, torch.tensor(1 if i < 3 else 3))
        return x


class Autocasts(Stack):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            with torch.autocast("cpu", torch.bfloat16, enabled=i >= 3):
                x = layer(x).float()
        return x


class InspectsLayers(Stack):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            named = "scale" in inspect.signature(layer.forward).parameters
            x = layer(x, scale=3.0) if named else layer(x)
        return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stack(AssignsBuffer),
        lambda: PassesNumbers(ReadsNumber),
        Autocasts,
        InspectsLayers,
    ],
    ids=["assigned buffer", "constant as argument", "autocast", "signature"],
)
def test_what_a_full_trace_sees(make: Any, replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(3, 8)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    check(model, (x,), replays, monkeypatch)
    model.load_state_dict(state)
    gm = dovetail.capture(model, (x,))
    gm(x)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    model(x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, after[name])


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (ReadsIndex, 0),
        (Alternates, 1),
        (WritesInput, DEPTH - 2),
        (WritesItself, DEPTH - 2),
        (ReturnsInput, DEPTH - 2),
        (ReturnsView, 0),
        (HasConstant, 0),
        (WithoutGradients, DEPTH - 2),
        (Dropping, DEPTH - 2),
        (ReadsOnlyOnce, DEPTH - 2),
    ],
)
def test_layers_of_many_kinds(
    make: Any, count: int, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check(Stack(make).eval(), (torch.randn(3, 8),), replays, monkeypatch) == count


def test_buffers_that_layers_update(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(Normalizing).train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x = torch.randn(6, 8)
    gm = dovetail.capture(model, (x,))
    assert replays.count == DEPTH - 2
    gm(x)
    after = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.load_state_dict(before, strict=False)
    model(x)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, after[name])


def test_buffers_that_get_values_with_gradients(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    class Averaging(Layer):
        mean: Tensor

        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor, scale: float = 1.0) -> Any:
            self.mean.add_(x.mean(0))
            return super().forward(x)

    assert check(Stack(Averaging).eval(), (torch.randn(3, 8),), replays, monkeypatch) == 0


def test_state_that_is_not_an_attribute(replays: Replays) -> None:
    model, x = Stack(Counts), torch.randn(3, 8)
    Counts.calls.clear()
    gm = dovetail.capture(model, (x,))
    Counts.calls.clear()
    assert torch.equal(gm(x), model(x))


class Collects(Layer):
    """Hands out a tensor through a list."""

    collected: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        Collects.collected.append(torch.sin(y))
        return y


class Collecting(Stack):
    def forward(self, x: Tensor) -> Any:
        Collects.collected.clear()
        y = super().forward(x)
        return y, *Collects.collected


@pytest.mark.parametrize("used", [False, True])
def test_tensors_that_layers_hand_out_by_a_list(
    used: bool, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Using(Collecting):
        def forward(self, x: Tensor) -> Any:
            y, *collected = super().forward(x)
            return y + sum(c.sum() for c in collected)

    model = (Using if used else Collecting)(Collects)
    x = torch.randn(3, 8)
    gm = dovetail.capture(model, (x,))
    expected, results = model(x), gm(x)
    assert len(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)) == DEPTH
    if used:
        assert torch.equal(results, expected)
    else:
        assert len(results) == DEPTH + 1
        assert all(map(torch.equal, results, expected))


class Passing(Stack):
    """Passes a dict that layers write to."""

    def forward(self, x: Tensor) -> Any:
        state = {"sum": torch.zeros(8)}
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, state)
        return x, state["sum"]


class WritesDict(Layer):
    def forward(self, x: Tensor, state: Any = None) -> Any:
        y = super().forward(x)
        state["sum"] = state["sum"] + y.sum(0)
        return y


def test_arguments_that_layers_change(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(Passing(WritesDict), (torch.randn(3, 8),), replays, monkeypatch) == 0


def scaled(own: Callable[..., Any], number: int) -> Callable[..., Any]:
    def forward(x: Tensor) -> Any:
        return own(x) * number

    return forward


@pytest.mark.parametrize("inner", [False, True])
def test_forwards_that_are_not_the_class_s(
    inner: bool, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = Stack()
    for number, layer in enumerate(model.layers):
        owner: Any = layer.linear if inner else layer
        owner.forward = scaled(owner.forward, number)
    assert check(model, (torch.randn(3, 8),), replays, monkeypatch) == 0


@pytest.mark.parametrize("inner", [False, True])
def test_hooks(inner: bool, replays: Replays) -> None:
    model, x = Stack(), torch.randn(3, 8)
    for layer in model.layers:
        hooked: Any = layer.linear if inner else layer
        hooked.register_forward_hook(lambda module, args, result: result * 2)
    gm = dovetail.capture(model, (x,))
    assert replays.count == (0 if inner else DEPTH - 2)
    assert torch.equal(gm(x), model(x))


class WithStructures(nn.Module):
    """Layers with keyword arguments, structures and constants as results, and tensors that all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Structured(i) for i in range(DEPTH))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        mask = torch.ones(3, 1).cumsum(0)
        states = []
        for layer in self.layers:
            out = layer(x, mask=mask, options=(1, "a", None))
            x = out["value"]
            states.append(out["state"][0])
        return x, states


class Structured(Layer):
    def forward(self, x: Tensor, *, mask: Any = None, options: Any = None) -> Any:
        y = super().forward(x) * mask
        return {"value": y, "state": (torch.sin(y), options[0], None)}


def test_structures_and_shared_arguments(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(WithStructures(), (torch.randn(3, 8),), replays, monkeypatch) == DEPTH - 2


class Shared(nn.Module):
    """One module that is called several times, beside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.again = Stack(), Layer(0)

    def forward(self, x: Tensor) -> Any:
        for _ in range(4):
            x = self.again(x)
        for layer in (*self.stack.layers, *self.stack.layers):
            x = layer(x)
        return x


def test_layers_that_are_called_twice(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(Shared(), (torch.randn(3, 8),), replays, monkeypatch) == DEPTH - 2


@pytest.mark.parametrize("whole", [False, True])
def test_modules_that_are_in_two_places(
    whole: bool, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch.export gives the operations of all modules paths in another way then.
    model: Any = Stack()
    if whole:
        model.layers[4] = model.layers[1]
    else:
        model.layers[3].linear = model.layers[2].linear
    assert check(model, (torch.randn(3, 8),), replays, monkeypatch) == 0


def test_nested_stacks(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(lambda _: Stack(depth=4), depth=4)
    count = check(model, (torch.randn(3, 8),), replays, monkeypatch)
    assert count == 2 * 2 + 2  # in each of the two that are traced, and the others


def test_tied_weights(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = Stack()
    for layer in model.layers:
        layer.linear.weight = model.layers[0].linear.weight
    assert check(model, (torch.randn(3, 8),), replays, monkeypatch) == DEPTH - 2
    model.layers[1].linear.bias = model.layers[0].linear.bias
    check(model, (torch.randn(3, 8),), replays, monkeypatch)


def test_dynamic_sizes(replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}}
    model, x = Stack(), torch.randn(6, 8)
    assert check(model, (x,), replays, monkeypatch, dynamic_shapes=shapes) > 0
    gm = dovetail.capture(model, (x,), dynamic_shapes=shapes)
    x = torch.randn(11, 8)
    assert torch.equal(gm(x), model(x))


@pytest.mark.parametrize("name", zoo.names())
def test_the_zoo(name: str, replays: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = zoo.get(name)
    torch.manual_seed(0)
    model, given = entry.build("small").eval(), entry.example_inputs("small", batch=1)
    check(model, given.args, replays, monkeypatch, kwargs=given.kwargs)


def _text_models() -> dict[str, Any]:
    import transformers as t

    small = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": DEPTH}
    decoder = {**small, "vocab_size": 64, "num_key_value_heads": 2}
    gemma = {**decoder, "head_dim": 8, "sliding_window": 4}
    return {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**decoder, use_cache=False)),
        "llama with a cache": lambda: t.LlamaForCausalLM(t.LlamaConfig(**decoder, use_cache=True)),
        "mistral": lambda: t.MistralModel(t.MistralConfig(**decoder, use_cache=False)),
        "qwen3": lambda: t.Qwen3Model(t.Qwen3Config(**decoder, head_dim=8, use_cache=False)),
        "gemma2, alternating": lambda: t.Gemma2Model(t.Gemma2Config(**gemma, use_cache=False)),
        "gemma3, alternating": lambda: t.Gemma3TextModel(t.Gemma3TextConfig(**gemma, use_cache=False)),
        "bert": lambda: t.BertModel(t.BertConfig(vocab_size=64, **small)),
        "albert, one layer": lambda: t.AlbertModel(t.AlbertConfig(vocab_size=64, embedding_size=16, **small)),
        "gpt2": lambda: t.GPT2Model(
            t.GPT2Config(vocab_size=64, n_embd=32, n_head=4, n_layer=DEPTH, use_cache=False)
        ),
        "gpt_neo, alternating": lambda: t.GPTNeoModel(
            t.GPTNeoConfig(
                vocab_size=64,
                hidden_size=32,
                num_heads=4,
                num_layers=6,
                attention_types=[[["global", "local"], 3]],
                window_size=4,
                use_cache=False,
            )
        ),
        "t5, bias in the first layer": lambda: t.T5EncoderModel(
            t.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=DEPTH, num_heads=4)
        ),
    }


TRACED = ("llama with a cache", "albert, one layer", "gpt_neo, alternating")
"""Models whose layers are traced: a cache is an object, one layer is called again and again, and constants are tensors."""


@pytest.mark.parametrize("hidden", [False, True], ids=["", "with hidden states"])
@pytest.mark.parametrize("name", list(_text_models()))
def test_models_of_transformers(
    name: str, hidden: bool, replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = _text_models()[name]().eval()
    kwargs = {"output_hidden_states": True} if hidden else {}
    count = check(model, (torch.randint(0, 64, (1, 6)),), replays, monkeypatch, kwargs=kwargs)
    # Hidden states are recorded by hooks, on submodules of layers too.
    assert (count > 0) == (name not in TRACED and not hidden)


def test_a_model_of_transformers_with_dynamic_sizes(
    replays: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = _text_models()["llama"]().eval()
    shapes = {"input_ids": {1: torch.export.Dim("length", min=2, max=64)}}
    ids = torch.randint(0, 64, (1, 6))
    assert check(model, (ids,), replays, monkeypatch, dynamic_shapes=shapes) > 0
