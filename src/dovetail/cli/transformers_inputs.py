"""Example inputs of a model, from the parameters of its `forward` and the fields of its configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

BATCH, LENGTH = 2, 8


def _fields(config: Any, names: tuple[str, ...]) -> list[int]:
    """The values of the first of these fields that a configuration or one nested in it has."""
    values: list[int] = []
    nested = [getattr(config, n, None) for n in getattr(config, "sub_configs", {}) or {}]
    for part in (config, *(c for c in nested if c is not None)):
        for name in names:
            value = getattr(part, name, None)
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], int):
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool):
                values.append(value)
    return list(dict.fromkeys(values))


def _first(config: Any, default: int, *names: str) -> int:
    return next(iter(_fields(config, names)), default)


def _ids(config: Any, length: int = LENGTH, *more: int) -> torch.Tensor:
    vocab = min(_fields(config, ("vocab_size",)) or [100])
    return torch.randint(3, max(4, min(vocab, 100)), (BATCH, length, *more))


def _pixels(config: Any) -> list[torch.Tensor]:
    channels = _first(config, 3, "num_channels", "in_channels", "in_chans", "num_input_channels")
    sizes = _fields(config, ("image_size", "img_size", "input_size", "resolution"))
    frames = _first(config, 0, "num_frames", "frames_per_clip")
    shapes: list[tuple[int, ...]] = []
    for size in [*sizes, 64, 224]:
        for c in dict.fromkeys((channels, 3)):
            flat = (BATCH, c, size, size)
            shapes += [(BATCH, frames, c, size, size), flat] if frames else [flat]
    pairs = [(BATCH, 2, 3, 64, 64), (BATCH, 2, 1, 64, 64)]
    return [torch.randn(s) for s in dict.fromkeys([*shapes, *pairs])]


def _features(config: Any) -> list[torch.Tensor]:
    bins = _fields(
        config,
        ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim", "n_mels",
         "input_channels", "input_dim", "num_mels", "input_feat_size", "mel_dim"),
    ) or [80]  # fmt: skip
    lengths = [2 * n for n in _fields(config, ("max_source_positions",))] + [64, 256]
    shapes: list[tuple[int, ...]] = [s for b in bins for n in lengths for s in ((BATCH, b, n), (BATCH, n, b))]
    shapes += [(BATCH, 1, 1024, bins[0])]
    return [torch.randn(s) for s in shapes]


def _waves(config: Any) -> list[torch.Tensor]:
    channels = _first(config, 1, "audio_channels", "num_channels")
    shapes = [
        (BATCH, 4000),
        (BATCH, channels, 3840),
        (BATCH, channels, 16000),
        (BATCH, 64, 16),
        (BATCH, 1024, 128),
    ]
    return [torch.randn(s) for s in [*shapes, (BATCH, LENGTH, _first(config, 64, "hidden_size"))]]


def _series(config: Any) -> list[torch.Tensor]:
    length = _first(config, 32, "context_length", "prediction_length")
    lags = getattr(config, "lags_sequence", None)
    if lags:
        return [torch.randn(BATCH, length + max(lags))]
    return [torch.randn(BATCH, length, _first(config, 1, "num_input_channels", "input_size"))]


def candidates(name: str, config: Any) -> list[torch.Tensor]:
    """Return values that a parameter of this name may take, the likeliest first."""
    decoder = (
        getattr(config, "decoder", None) if not isinstance(getattr(config, "decoder", None), dict) else None
    )
    match name:
        case "input_ids" | "decoder_input_ids" | "text_input_ids" | "question_input_ids":
            books = _first(
                config, 0, "num_codebooks", "num_channels" if "dia" in type(config).__name__.lower() else ""
            )
            ids = _ids(decoder if decoder is not None and name.startswith("decoder") else config)
            return [ids, *([_ids(config, LENGTH, books)] if books else [])]
        case "pixel_values" | "pixel_values_videos" | "images" | "image" | "pixel_values_images":
            return _pixels(config)
        case "input_features" | "audio_features" | "mel" | "spectrogram":
            return _features(config)
        case "input_values":
            return _waves(config)
        case "past_values":
            return _series(config)
        case "bbox":
            return [torch.randint(0, 32, (BATCH, LENGTH, 4)).sort(-1).values[..., [0, 1, 2, 3]]]
        case "input_features_mask" | "feature_attention_mask" | "padding_mask":
            return [torch.ones(BATCH, max(f.shape[1:]), dtype=torch.int64) for f in _features(config)]
        case "pixel_mask" | "pixel_attention_mask":
            return [torch.ones(BATCH, *p.shape[-2:], dtype=torch.int64) for p in _pixels(config)]
        case "past_time_features":
            return [torch.randn(*_series(config)[0].shape[:2], _first(config, 0, "num_time_features"))]
        case "future_time_features":
            lengths = (_first(config, 8, "prediction_length"), _first(config, 0, "num_time_features"))
            return [torch.randn(BATCH, *lengths)]
        case "query_embeds":
            return [torch.randn(BATCH, LENGTH, _first(config, 64, "hidden_size"))]
        case "past_observed_mask":
            return [torch.ones(s.shape) for s in _series(config)]
        case "attention_mask" | "decoder_attention_mask" | "text_attention_mask":
            return [torch.ones(BATCH, LENGTH, dtype=torch.int64)]
        case (
            "hidden_states"
            | "inputs_embeds"
            | "encoder_hidden_states"
            | "image_embeddings"
            | "vision_features"
        ):
            width = _first(config, 64, "hidden_size", "d_model", "embed_dim")
            return [torch.randn(BATCH, LENGTH, width), torch.randn(BATCH, width, 8, 8)]
        case "inputs":
            return [_ids(config), torch.randn(BATCH, LENGTH, _first(config, 64, "d_model"))]
        case "position_ids" | "token_type_ids":
            return [torch.arange(LENGTH).expand(BATCH, LENGTH).contiguous()]
        case "audio_codes" | "codes":
            return [
                _ids(config)[:, None].expand(
                    BATCH, _first(config, 1, "num_quantizers", "n_codebooks"), LENGTH
                )
            ]
        case _:
            return []


GRIDS = ("image_grid_thw", "grid_thw", "image_grid_hw", "image_grid", "grid_hw")
MASKS = (
    "attention_mask", "input_features_mask", "feature_attention_mask", "pixel_attention_mask", "pixel_mask",
    "padding_mask", "decoder_attention_mask", "future_time_features",
)  # fmt: skip
MODALITIES = (
    "input_ids", "pixel_values", "input_features", "input_values", "pixel_values_videos", "bbox", "inputs",
    "past_values", "images",
)  # fmt: skip


def calls(model: nn.Module, config: Any, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments to try a model with, those that exercise most of it first."""
    if given:
        yield dict(given)
    parameters = inspect.signature(model.forward).parameters
    required = [
        n
        for n, p in parameters.items()
        if p.default is inspect.Parameter.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    decoding = ["decoder_input_ids"] if "decoder_input_ids" in parameters else []
    every = [n for n in MODALITIES if n in parameters and n != "pixel_values_videos"]
    named = getattr(model, "main_input_name", "input_ids")
    main = named if isinstance(named, str) else named[0]
    masks = [n for n in MASKS if n in parameters]
    sets = [
        [*every, *required],
        [*every, *required, *masks],
        [main, *required],
        *([n, *required] for n in every),
        required,
    ]
    if any(n in parameters for n in GRIDS):
        yield from _grids(parameters, config)
    seen: set[frozenset[str]] = set()
    for names in sets:
        for chosen in ([*names, *decoding], names):
            key = frozenset(n for n in chosen if n in parameters)
            if key and key not in seen:
                seen.add(key)
                yield from _combinations(sorted(key), config)


def _grids(parameters: Any, config: Any) -> Iterator[dict[str, Any]]:
    """Yield images as rows of patches, with the number of patches along time, height and width of each."""
    vision = next(
        (c for n in ("vision_config", "vision_encoder_config") if (c := getattr(config, n, None))), config
    )
    patch = _first(vision, 14, "patch_size")
    channels, frames = (
        _first(vision, 3, "in_channels", "num_channels", "in_chans"),
        _first(vision, 1, "temporal_patch_size"),
    )
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    rows = torch.randn(16 * BATCH, channels * frames * patch * patch)
    name = next(n for n in GRIDS if n in parameters)
    pixels = next((n for n in ("pixel_values", "hidden_states") if n in parameters), None)
    if pixels is None:
        return
    given = {"input_ids": _ids(config)} if "input_ids" in parameters else {}
    for shaped in (rows, rows.reshape(-1, channels, patch, patch)):
        for sizes in (grid, grid[:, 1:]):
            yield {**given, pixels: shaped, name: sizes}


def _combinations(names: list[str], config: Any) -> Iterator[dict[str, Any]]:
    options = {n: candidates(n, config) for n in names}
    if not all(options.values()):
        return
    for at in range(min(8, max(len(o) for o in options.values()))):
        yield {n: o[min(at, len(o) - 1)] for n, o in options.items()}


def with_placeholders(kwargs: dict[str, Any], config: Any, message: str) -> dict[str, Any] | None:
    """Return the call with as many image or audio tokens as the message about a wrong number of them asks for."""
    if "input_ids" not in kwargs or "token" not in message:
        return None
    numbers = [int(n) for n in re.findall(r"\d+", message)]
    names = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index", "media_token_id",
             "speech_token_id", "im_patch_id", "placeholder_token_id")  # fmt: skip
    token = next((t for n in names for t in _fields(config, (n,))), None)
    if token is not None and "mm_token_type_ids" in message and "mm_token_type_ids" not in kwargs:
        return {**kwargs, "mm_token_type_ids": (kwargs["input_ids"] == token).long()}
    if token is None or "match" not in message or len(numbers) < 2 or max(numbers) > 4096:
        return None
    count = max(numbers) // BATCH
    if int((kwargs["input_ids"] == token).sum()) == count * BATCH or count == 0:
        return None
    ids = torch.cat([_ids(config, 4), torch.full((BATCH, count), token), _ids(config, 4)], dim=1)
    types = {"mm_token_type_ids": (ids == token).long()} if "mm_token_type_ids" in kwargs else {}
    return {**kwargs, "input_ids": ids, **types}
