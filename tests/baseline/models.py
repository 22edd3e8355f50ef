"""The models of the zoo and small models of transformers: captured, fused and compiled."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import dovetail
from dovetail import zoo

from .dump import Counting, section, tried, whole

Entries = Iterator[tuple[str, str]]
TORCHSCRIPT = ("mlp", "bert", "resnet")


class Subject(NamedTuple):
    """A model, and what it is called with."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any = None

    def capture(self) -> Any:
        # A model may change what it is given, caches for one.
        args, kwargs = copy.deepcopy((self.args, self.kwargs))
        return dovetail.capture(self.model, args, kwargs, dynamic_shapes=self.dynamic_shapes)

    def compile(self, backends: Any) -> Any:
        return dovetail.compile(
            self.model,
            self.args,
            self.kwargs,
            backends=backends,
            dynamic_shapes=self.dynamic_shapes,
            cache=False,
        )

    def call(self, model: Any) -> None:
        torch.manual_seed(1)
        model(*copy.deepcopy(self.args), **copy.deepcopy(self.kwargs))


def of_the_zoo(name: str, *, train: bool = False, batch: bool = False) -> Subject:
    """A model of the zoo; with `batch` the first size of every input varies."""
    entry = zoo.get(name)
    model = entry.build("tiny").train(train)
    inputs = entry.example_inputs("tiny", batch=3) if batch else entry.example_inputs("tiny")
    return Subject(
        model,
        inputs.args,
        dict(inputs.kwargs),
        _open_batch(model, inputs.args, inputs.kwargs) if batch else None,
    )


def _open_batch(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    size = torch.export.Dim("batch", min=2, max=64)
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return {name: {0: size} if isinstance(value, Tensor) else None for name, value in bound.items()}


def captured_and_fused(make: Callable[[], Subject]) -> Entries:
    subject = make()
    gm = subject.capture()
    yield "capture", whole(gm)
    yield "fuse", tried(lambda: whole(dovetail.fuse(gm)))


def compiled(make: Callable[[], Subject], *, torchscript: bool) -> Entries:
    yield "compile eager", tried(lambda: whole(make().compile([dovetail.backends.Eager()])))
    yield "compile counting", tried(lambda: _counted(make()))
    if torchscript:
        chain = [dovetail.backends.TorchScript(), dovetail.backends.Eager()]
        yield "compile torchscript", tried(lambda: whole(make().compile(chain)))


def _counted(subject: Subject) -> str:
    """What is compiled at once and in calls of other kinds, until nothing is any more."""
    counting = Counting()
    fast = subject.compile([counting])
    text = counting.so_far("compile")
    with torch.no_grad():
        for when in ("first call", "second call"):
            subject.call(fast)
            text += counting.so_far(f"{when} without gradients")
    for when in ("first call", "second call"):
        subject.call(fast)
        text += counting.so_far(f"{when} with gradients")
    fast.train(not fast.training)
    subject.call(fast)
    text += counting.so_far("in the other mode")
    return text + section("graphs", str(len(fast.graphs))) + whole(fast)


def zoo_entries(name: str, mode: str) -> Entries:
    make = functools.partial(of_the_zoo, name, train=mode == "train", batch=mode == "open batch")
    yield from captured_and_fused(make)
    yield from compiled(make, torchscript=mode == "eval" and name in TORCHSCRIPT)


# Models of transformers, with the sizes that the other tests have.

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def _tokens(length: int = 8) -> Tensor:
    return torch.randint(0, 60, (2, length), generator=torch.Generator().manual_seed(length))


def _numbers(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(len(sizes)))


def _subject(
    name: str, config: str, args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
) -> Subject:
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**options))
    return Subject(model.eval().requires_grad_(False), args, kwargs)


def _decoder(name: str, **options: Any) -> Subject:
    options = {**_SMALL, "num_key_value_heads": 2, "vocab_size": 64, **options}
    return _subject(f"{name}ForCausalLM", f"{name}Config", (_tokens(),), {"use_cache": False}, **options)


def _bert(**options: Any) -> Subject:
    mask = torch.ones(2, 8, dtype=torch.long)
    given = {"attention_mask": mask}
    return _subject("BertModel", "BertConfig", (_tokens(),), given, **_SMALL, vocab_size=64, **options)


def _gpt2(**options: Any) -> Subject:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    return _subject("GPT2LMHeadModel", "GPT2Config", (_tokens(),), {"use_cache": False}, **sizes, **options)


def _t5(**options: Any) -> Subject:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    given = {"decoder_input_ids": _tokens(6), "use_cache": False}
    options = {**sizes, "decoder_start_token_id": 0, **options}
    return _subject("T5ForConditionalGeneration", "T5Config", (_tokens(),), given, **options)


def _vit(**options: Any) -> Subject:
    options = {**_SMALL, "image_size": 16, "patch_size": 8, "num_labels": 5, **options}
    return _subject("ViTForImageClassification", "ViTConfig", (_numbers(2, 3, 16, 16),), {}, **options)


def _whisper(**options: Any) -> Subject:
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _WHISPER.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    longest = {"max_source_positions": 16, "max_target_positions": 16}
    options = {**sizes, **tokens, **longest, "d_model": 32, "vocab_size": 64, "num_mel_bins": 8, **options}
    given = {"decoder_input_ids": _tokens(6), "use_cache": False}
    return _subject(
        "WhisperForConditionalGeneration", "WhisperConfig", (_numbers(2, 8, 32),), given, **options
    )


_WHISPER = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}


def _trained(subject: Subject, **kwargs: Any) -> Subject:
    model = subject.model.train().requires_grad_(True)
    return subject._replace(model=model, kwargs={**subject.kwargs, **kwargs})


def _prefilled(given: bool) -> Subject:
    import transformers

    subject = _decoder("Llama")
    cache = {"past_key_values": transformers.DynamicCache(config=subject.model.config)} if given else {}
    return subject._replace(kwargs={"use_cache": True, **cache})


def _decoding() -> Subject:
    """One token at a time, with a cache that grows."""
    subject = _decoder("Llama")
    past = subject.model(_tokens(8), use_cache=True).past_key_values
    grows = [{2: torch.export.Dim.AUTO}] * 2
    shapes = {"input_ids": None, "past_key_values": [grows, grows], "use_cache": None}
    return Subject(subject.model, (_tokens(1),), {"past_key_values": past, "use_cache": True}, shapes)


_ARCHITECTURES: dict[str, Callable[..., Subject]] = {
    "llama": functools.partial(_decoder, "Llama"),
    "qwen2": functools.partial(_decoder, "Qwen2"),
    "qwen3": functools.partial(_decoder, "Qwen3", head_dim=8),
    "mixtral": functools.partial(_decoder, "Mixtral", num_local_experts=2, num_experts_per_tok=1),
    "bert": _bert,
    "gpt2": _gpt2,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
}
TRANSFORMERS: dict[str, Callable[[], Subject]] = {
    f"{name} {attention}": functools.partial(make, attn_implementation=attention)
    for name, make in _ARCHITECTURES.items()
    for attention in ("sdpa", "eager")
}
TRANSFORMERS |= {
    "bert in training": lambda: _trained(_bert()),
    "llama in training": lambda: _trained(_decoder("Llama"), labels=_tokens()),
    "llama that makes a cache": lambda: _prefilled(given=False),
    "llama that fills a cache": lambda: _prefilled(given=True),
    "llama decoding": _decoding,
}

SUBJECTS: dict[str, Callable[[], Entries]] = {
    f"zoo/{name}/{mode}": functools.partial(zoo_entries, name, mode)
    for name in zoo.names()
    for mode in ("eval", "train", "open batch")
}
SUBJECTS |= {
    f"transformers/{name}": functools.partial(captured_and_fused, make) for name, make in TRANSFORMERS.items()
}
