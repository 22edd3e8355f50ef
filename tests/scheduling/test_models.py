"""Whole schedules of real models: every norm, attention and MLP fused, attention replaced, verified and trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail import zoo
from dovetail.rules import library
from dovetail.scheduling.schedule import schedule

Model = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def of_the_zoo(name: str) -> Model:
    entry = zoo.get(name)
    inputs = entry.example_inputs()
    return entry.build(), inputs.args, dict(inputs.kwargs)


def hf_bert() -> Model:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=100,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, 6:] = 0
    return transformers.BertModel(config), (torch.randint(0, 100, (2, 8)),), {"attention_mask": mask}


def hf_llama() -> Model:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=100,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config), (torch.randint(0, 100, (2, 8)),), {"use_cache": False}


MODELS: dict[str, tuple[Callable[[], Model], str, dict[str, int]]] = {
    "llama": (
        lambda: of_the_zoo("llama"),
        "layers.*",
        {"attention": 2, "add_rms_norm": 2, "rms_norm": 2, "swiglu": 2},
    ),
    "bert": (lambda: of_the_zoo("bert"), "layers.*", {}),
    "hf_bert": (hf_bert, "encoder.layer.*", {"attention": 2, "add_layer_norm": 4}),
    "hf_llama": (hf_llama, "model.layers.*", {"attention": 2, "add_rms_norm": 2, "rms_norm": 2, "swiglu": 2}),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_every_norm_attention_and_mlp_is_fused(name: str, training: bool):
    make, glob, expected = MODELS[name]
    model, args, kwargs = make()
    model.train(training)
    s = schedule(model, args, kwargs)
    for rules in (library.NORMS, library.ATTENTION, library.GATES, library.LINEAR):
        matches = s[glob].find(rules)
        if matches:
            s.fuse(matches)
    result = Counter(region.kind for region in s.regions)
    if not training and torch.__version__.startswith("2.13"):
        assert expected.items() <= result.items()
    assert sum(result.values()) >= 6
    assert s.verify().runs


def test_convolutions_of_the_zoos_resnet_are_fused_in_its_blocks():
    model, args, kwargs = of_the_zoo("resnet")
    s = schedule(model.train(), args, kwargs)
    matches = s.find(library.CONVOLUTION)
    regions = s.fuse(matches)
    assert len(regions) >= 4
    s.verify()
    optimizer = torch.optim.SGD(s.build().parameters(), 0.01)
    out = model(*args, **kwargs)
    (out if isinstance(out, Tensor) else out[0]).square().mean().backward()
    optimizer.step()


def bert_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float = dovetail.Const()) -> Tensor:
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / scale + bias, dim=-1), v)


def fast_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1 / scale)


def test_attention_by_hand_is_replaced_by_torchs():
    model, args, kwargs = of_the_zoo("bert")
    model.eval()
    s = schedule(model, args, kwargs)
    matches = s.find(bert_attention)
    assert matches, matches.why
    for match in matches:
        s.replace(fast_attention, match, concrete_args={"scale": match["scale"]}, check=True)
    s.verify()
    calls: list[Any] = []

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(func)
            return func(*args, **(kwargs or {}))

    built = s.build()
    with Counting():
        built(*args, **kwargs)
    assert calls.count(F.scaled_dot_product_attention) == len(matches)


def test_a_schedule_of_one_model_is_replayed_on_another_of_its_kind():
    model, args, kwargs = hf_llama()
    s = schedule(model.eval(), args, kwargs)
    for rules in (library.NORMS, library.GATES):
        s.fuse(s["model.layers.*"].find(rules))
    other, _, _ = hf_llama()
    t = schedule(other.eval()).replay(s.history.json())
    assert [r.name for r in t.regions] == [r.name for r in s.regions]
    t.verify()
