"""Operands of regions arrive as capture expects them: after `compile` with example inputs the first call compiles nothing."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail import zoo
from tests.lowering.helpers import Counting

LAST = torch.channels_last
LAYOUTS = [torch.contiguous_format, LAST]


class Residual(nn.Module):
    """A block of two convolutions, of which one may be strided, depthwise or transposed."""

    def __init__(self, channels: int, **options: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False, **options)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Images(nn.Module):
    """Layers whose results have the memory format of their input, and some that do not."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width), nn.SiLU())
        self.blocks = nn.ModuleList(Residual(width, groups=g) for g in (1, 1, width, width))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.norm = nn.GroupNorm(2, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        skipped = nn.functional.interpolate(self.pool(x), scale_factor=2.0)
        x = torch.cat([self.up(self.pool(x)), skipped], 1)
        x = self.norm(x[:, ::2].contiguous())
        return self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def compiled_later(model: nn.Module, *args: Any, device: str = "cpu") -> list[str]:
    """Return the regions that are compiled in the first calls of a model that was compiled for them."""
    backend = Counting()
    model = model.to(device)
    inputs = tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)
    compiled = dovetail.compile(model, inputs, backends=[backend], cache=False, on_error="raise")
    before = len(backend.compiled)
    assert before
    for _ in range(2):
        compiled(*inputs)
    assert backend.calls
    return backend.compiled[before:]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["contiguous", "channels last"])
def test_images(layout: Any) -> None:
    model = Images().eval().to(memory_format=layout)
    x = torch.randn(2, 3, 29, 29).to(memory_format=layout)
    with torch.no_grad():
        assert compiled_later(model, x) == []


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("name", zoo.names())
def test_models_of_the_zoo(name: str, grad: bool) -> None:
    entry = zoo.get(name)
    model, given = entry.build("tiny").train(grad), entry.example_inputs("tiny")
    args = inspect.signature(model.forward).bind(*given.args, **given.kwargs).args
    with torch.set_grad_enabled(grad):
        assert compiled_later(model, *args) == []


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    models: list[tuple[Any, Any, Any]] = [
        (transformers.BertModel, transformers.BertConfig(vocab_size=99, **small), None),
        (transformers.LlamaModel, transformers.LlamaConfig(vocab_size=99, use_cache=False, **small), None),
        (transformers.ViTModel, transformers.ViTConfig(image_size=32, patch_size=8, **small), 32),
        (transformers.ConvNextModel, transformers.ConvNextConfig(hidden_sizes=[8] * 4, depths=[2] * 4), 64),
        (
            transformers.ResNetModel,
            transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16] * 4, depths=[2] * 4),
            64,
        ),
    ]
    for model, config, size in models:
        for layout in LAYOUTS if size else LAYOUTS[:1]:
            x = torch.randint(0, 99, (2, 7)) if size is None else torch.randn(2, 3, size, size)
            x = x if size is None else x.to(memory_format=layout)
            with torch.no_grad():
                built = model(config).eval().to(memory_format=layout)
                assert compiled_later(built, x) == [], (model.__name__, layout)
