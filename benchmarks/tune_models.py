"""What is tuned: the twelve models of the comparison of compilers, and subgraphs cut from Hugging Face's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from benchmarks.backends_models import LARGE, Only, build
from dovetail import zoo
from dovetail.frontend.capture import capture
from dovetail.ir.dependencies import Index
from dovetail.ir.nodes import is_projection
from dovetail.tuning.block import Block, record_inputs, take_out

TWELVE = (*zoo.names(), *LARGE)
WINDOWS = 4
"""Subgraphs of each model."""
_OPERATIONS = 24
"""Operations of a subgraph."""
Example = tuple[nn.Module, tuple[Any, ...]]


def _ids(vocabulary: int, length: int = 64) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, vocabulary, (1, length)),)


def _bert() -> Example:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024
    )
    return Only(BertModel(config), "last_hidden_state"), _ids(1000)


def _gpt2() -> Example:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=1000, n_embd=256, n_layer=2, n_head=4, use_cache=False)
    return Only(GPT2Model(config), "last_hidden_state"), _ids(1000)


def _llama() -> Example:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return Only(LlamaModel(config), "last_hidden_state"), _ids(1000)


def _gemma() -> Example:
    from transformers import GemmaConfig, GemmaModel

    config = GemmaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        use_cache=False,
    )
    return Only(GemmaModel(config), "last_hidden_state"), _ids(1000)


def _distilbert() -> Example:
    from transformers import DistilBertConfig, DistilBertModel

    config = DistilBertConfig(vocab_size=1000, dim=256, n_layers=2, n_heads=4, hidden_dim=1024)
    return Only(DistilBertModel(config), "last_hidden_state"), _ids(1000)


def _vit() -> Example:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=192,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=768,
    )
    return Only(ViTModel(config), "last_hidden_state"), (torch.randn(1, 3, 64, 64),)


def _resnet() -> Example:
    from transformers import ResNetConfig, ResNetModel

    config = ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256, 256], depths=[1, 1, 1, 1])
    return Only(ResNetModel(config), "last_hidden_state"), (torch.randn(1, 3, 64, 64),)


def _convnext() -> Example:
    from transformers import ConvNextConfig, ConvNextModel

    config = ConvNextConfig(hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 1, 1])
    return Only(ConvNextModel(config), "last_hidden_state"), (torch.randn(1, 3, 64, 64),)


def _t5() -> Example:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=1000, d_model=256, d_kv=64, d_ff=1024, num_layers=2, num_heads=4)
    return Only(T5EncoderModel(config), "last_hidden_state"), _ids(1000)


def _mobilenet() -> Example:
    from transformers import MobileNetV2Config, MobileNetV2Model

    config = MobileNetV2Config(image_size=64, depth_multiplier=0.5)
    return Only(MobileNetV2Model(config), "last_hidden_state"), (torch.randn(1, 3, 64, 64),)


SOURCES: dict[str, Callable[[], Example]] = {
    "bert": _bert,
    "convnext": _convnext,
    "distilbert": _distilbert,
    "gemma": _gemma,
    "gpt2": _gpt2,
    "llama": _llama,
    "mobilenet_v2": _mobilenet,
    "resnet": _resnet,
    "t5": _t5,
    "vit": _vit,
}
FORTY = tuple(f"{source}/{window}" for source in SOURCES for window in range(WINDOWS))


def example(name: str) -> Example:
    """Return a model or a subgraph in eval mode, with its inputs."""
    if "/" not in name:
        return build(name)
    source, _, window = name.partition("/")
    torch.manual_seed(0)
    model, args = SOURCES[source]()
    with torch.no_grad():
        graph = capture(model.eval(), args)
        block = cut(graph, args, int(window))
    return block.program, block.inputs


def cut(graph: GraphModule, args: tuple[Any, ...], window: int) -> Block:
    """Return some consecutive operations of a graph as a program that runs alone, at one of several places."""
    index = Index(graph)
    operations = [n for n in graph.graph.nodes if n.op == "call_function"]
    first = max(0, (len(operations) - _OPERATIONS) * window // (WINDOWS - 1))
    while is_projection(operations[first]):
        first -= 1
    last = first + _OPERATIONS
    while last < len(operations) and is_projection(operations[last]):
        last += 1
    chosen = operations[first:last]
    block = take_out(index, f"window {window}", chosen)
    record_inputs(graph, {block.key: block}, args, {}, grad=False)
    return block
