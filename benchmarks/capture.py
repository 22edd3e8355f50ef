"""Capture against torch.export of the same model, in one process.

    python -m benchmarks.capture [--only resnet t5] [--repeat 5] [--write benchmarks/RESULTS.md]

Both in turns, each with the garbage of the one before collected; medians of `--repeat` turns, after one that is not
counted. Seconds are of processor time: both run on one thread, and others on the machine do not count.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dovetail
from benchmarks.outline import machine
from benchmarks.results import write_section
from dovetail import zoo
from dovetail.frontend import decompose_program as direct
from dovetail.frontend.decompose_ops import Unsure

TITLE = "Capture against torch.export"
Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """One model; `retraced` is why it was decomposed by tracing it a second time, if it was."""

    name: str
    nodes: int
    export: float
    capture: float
    retraced: str

    @property
    def ratio(self) -> float:
        return self.capture / self.export

    def __str__(self) -> str:
        figures = f"{self.export:.2f} | {self.capture:.2f} | {self.ratio:.2f} | {self.retraced}"
        return f"| {self.name} | {self.nodes:,} | {figures} |"


def models() -> Iterator[tuple[str, Callable[[], Example]]]:
    """The models of the zoo in size small and small models of transformers, in eval and in train mode."""
    for name in zoo.names():
        for mode in ("eval", "train"):
            yield f"zoo {name}, {mode}", lambda name=name, mode=mode: _zoo(name, mode)
    for name, build in _transformers().items():
        for mode in ("eval", "train"):
            if (name, mode) not in _NOT_EXPORTED:
                yield f"{name}, {mode}", lambda build=build, mode=mode: _seeded(build, mode)


# They skip layers by a random number while training, which torch.export does not take.
_NOT_EXPORTED = {(name, "train") for name in ("Whisper", "Bart", "Wav2Vec2")}


def _zoo(name: str, mode: str) -> Example:
    torch.manual_seed(0)
    inputs = zoo.get(name).example_inputs("small")
    return zoo.get(name).build(size="small").train(mode == "train"), inputs.args, inputs.kwargs


def _seeded(build: Callable[[], Example], mode: str) -> Example:
    torch.manual_seed(0)
    model, args, kwargs = build()
    return model.train(mode == "train"), args, kwargs


def _transformers() -> dict[str, Callable[[], Example]]:
    import transformers as hf

    hf.logging.set_verbosity_error()
    ids, image = torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 3, 64, 64)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {**sizes, "vocab_size": 64}
    decoder = {**text, "num_key_value_heads": 2}
    seq2seq = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "vocab_size": 64,
    }
    stages = {"hidden_sizes": [8, 16, 16, 32], "depths": [2, 2, 2, 2]}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    dac = {
        "encoder_hidden_size": 8,
        "decoder_hidden_size": 32,
        "downsampling_ratios": [2, 4],
        "upsampling_ratios": [4, 2],
        "n_codebooks": 2,
        "codebook_size": 16,
        "codebook_dim": 4,
    }
    whisper = {"num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    audio = {
        "conv_dim": (16,) * 3,
        "conv_kernel": (10, 3, 3),
        "conv_stride": (5, 2, 2),
        "num_feat_extract_layers": 3,
    }
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    swin = {
        "image_size": 64,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": 4,
    }

    def given(model: nn.Module, *args: Tensor, **kwargs: Any) -> Example:
        return model, args, kwargs

    return {
        "Llama": lambda: given(hf.LlamaForCausalLM(hf.LlamaConfig(**decoder)), ids, use_cache=False),
        "Qwen3": lambda: given(
            hf.Qwen3ForCausalLM(hf.Qwen3Config(head_dim=8, **decoder)), ids, use_cache=False
        ),
        "GPT-2": lambda: given(
            hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=64)),
            ids,
            use_cache=False,
        ),
        "BERT": lambda: given(hf.BertModel(hf.BertConfig(**text)), ids),
        "DeBERTa": lambda: given(hf.DebertaV2Model(hf.DebertaV2Config(**text)), ids),
        "T5": lambda: given(
            hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0, **t5)),
            input_ids=ids,
            decoder_input_ids=ids,
            use_cache=False,
        ),
        "Bart": lambda: given(hf.BartModel(hf.BartConfig(**seq2seq)), ids, use_cache=False),
        "Whisper": lambda: given(
            hf.WhisperForConditionalGeneration(hf.WhisperConfig(**seq2seq, **whisper, **tokens)),
            input_features=torch.zeros(2, 8, 64),
            decoder_input_ids=ids,
            use_cache=False,
        ),
        "Wav2Vec2": lambda: given(
            hf.Wav2Vec2Model(hf.Wav2Vec2Config(**text, **audio, **positions)), torch.zeros(1, 2000)
        ),
        "DAC": lambda: given(hf.DacModel(hf.DacConfig(**dac)), torch.zeros(1, 1, 256)),
        "ViT": lambda: given(hf.ViTModel(hf.ViTConfig(image_size=64, patch_size=16, **sizes)), image),
        "Swin": lambda: given(hf.SwinModel(hf.SwinConfig(**swin)), image),
        "ConvNext": lambda: given(hf.ConvNextModel(hf.ConvNextConfig(**stages)), image),
        "SegFormer": lambda: given(
            hf.SegformerModel(hf.SegformerConfig(num_attention_heads=[1, 2, 2, 4], **stages)), image
        ),
        "ResNet": lambda: given(hf.ResNetModel(hf.ResNetConfig(embedding_size=8, **stages)), image),
        "MobileNetV2": lambda: given(
            hf.MobileNetV2Model(hf.MobileNetV2Config(image_size=64, depth_multiplier=0.35)), image
        ),
    }


def measure(name: str, example: Example, repeat: int) -> Row:
    """Median seconds of exporting and of capturing a model, in turns."""
    model, args, kwargs = example
    reasons: list[str] = []
    decomposed = direct.decomposed

    def noted(*given: Any) -> Any:
        try:
            return decomposed(*given)
        except Unsure as reason:
            reasons.append(str(reason))
            raise

    direct.decomposed = noted
    try:
        nodes = len(dovetail.capture(model, args, kwargs).graph.nodes)
    finally:
        direct.decomposed = decomposed
    torch.export.export(model, args, kwargs, strict=False)
    exports: list[float] = []
    captures: list[float] = []
    for _ in range(repeat):
        exports.append(_seconds(lambda: torch.export.export(model, args, kwargs, strict=False)))
        captures.append(_seconds(lambda: dovetail.capture(model, args, kwargs)))
    export, capture = (statistics.median(times) for times in (exports, captures))
    return Row(name, nodes, export, capture, reasons[0] if reasons else "")


def _seconds(step: Callable[[], Any]) -> float:
    gc.collect()
    start = time.process_time()
    step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", default=[""], help="measure models whose names contain one of these"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    head = "| model | nodes | torch.export s | capture s | ratio | traced a second time because |\n|---|---|---|---|---|---|"
    print(head, flush=True)
    rows: list[Row] = []
    for name, build in models():
        if any(part.lower() in name.lower() for part in options.only):
            rows.append(measure(name, build(), options.repeat))
            print(rows[-1], flush=True)
    if options.write:
        table = "\n".join([head, *map(str, rows)])
        text = f"`make bench-capture` measures this.\n\n{table}\n\nMedians of {options.repeat}; {machine()}"
        write_section(options.write, TITLE, text)


if __name__ == "__main__":
    main()
