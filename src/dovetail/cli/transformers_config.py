"""Small configurations of transformers' model types, by the names of the fields, and the models they describe."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers.models.auto import configuration_auto as configuration_names
from transformers.models.auto import modeling_auto

configuration_auto: Any = configuration_names

MOST_PARAMETERS = 120_000_000

HIDDEN, FFN, HEADS, HEAD_DIM, VOCAB, POSITIONS = 64, 128, 4, 16, 256, 128
LAYERS = re.compile(
    r"^(n_layers?|layers|depth|num_layers|num_hidden_layers|(num_)?(\w+_)?(num_)?(hidden_)?layers)$"
)
NOT_LAYERS = re.compile(
    r"(feat_extract|adapter|no_rope|rope|window|shared|postnet|predictor|add|proj|mtp|nextn)_?layers|num_feature_"
)
WIDTH = re.compile(
    r"^((\w+_)?hidden_(size|dim)|d_model|n_embd|dim|(\w+_)?embed_dim|embedding_(size|dim)|emb_dim|projection_dim"
    r"|\w*hidden_dimension|out_hidden_size|output_(dim|channels|hidden_size)|lru_width|channels|project_dim"
    r"|decoder_(hidden_size|embed_dim)|word_embed_proj_dim|pooler_(hidden|output)_size|(\w+_)?projection_size"
    r"|(\w+_)?lora_rank|fpn_hidden_size|mask_dim|mask_feature_size|classifier_proj_size|codebook_dim"
    r"|backbone_hidden_size|cross_hidden_size|feature_size|vision_output_dim|projector_output_dim)$"
)
WIDE = re.compile(
    r"(intermediate_(size|dim)|ffn_dim|d_ff|n_inner|dim_feedforward|mlp_dim|ffn_hidden_size|linear_units)$"
)
HEADED = re.compile(
    r"^(n_heads?|(\w+_)?(num_)?(attention_)?heads|(\w+_)?n_heads|linear_num_(key|value)_heads)$"
)
GROUPED = re.compile(r"(num_key_value_heads|num_kv_heads|n_kv_heads|encoder_kv_heads|decoder_kv_heads)$")
HEAD = re.compile(
    r"^((\w+_)?head_dim|d_kv|dim_head|(\w+_)?head_size|attention_head_dim|(\w+_)?dim_head|mamba_d_head)$"
)
WORDS = re.compile(r"(vocab_size(_\w+)?|vocab_size|codebook_size|n_words|num_embeddings)$")
PLACES = re.compile(
    r"^((\w+_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|block_size"
    r"|max_2d_position_embeddings|sliding_window|attention_window_size|model_max_length)$"
)
TOKEN = re.compile(r"(\w+)_(token_id|token_index|token_ids|index_id)$")
FIXED: dict[str, int | float] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "top_k_experts": 2,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "max_source_positions": 32, "num_queries": 8, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "qk_head_dim": 32, "rotary_dim": 8, "num_kv_shared_layers": 0, "state_size": 8, "mamba_d_state": 16,
    "ssm_state_size": 16, "chunk_size": 16, "mamba_chunk_size": 16, "index_topk": 4, "max_window_layers": 1,
    "query_pre_attn_scalar": 16, "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_n_groups": 1,
    "n_groups": 1, "num_query_tokens": 4, "resampler_n_latents": 4, "num_latents": 8, "d_latents": 64,
    "first_k_dense_replace": 1, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16,
    "time_step_rank": 4, "index_n_heads": 2, "num_codebooks": 4, "num_nextn_predict_layers": 0,
    "num_mel_bins": 16, "num_denoising": 4, "aligner_num_add_layers": 1, "resampler_depth": 1,
    "expert_layer_period": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "mamba_dt_rank": 8, "num_expert_group": 2, "linear_head_dim": 16, "linear_num_heads": 4,
    "upsample_groups": HIDDEN, "encoder_hash_byte_group_vocab": 500, "hidden_size_global": HIDDEN,
}  # fmt: skip
ABSENT: dict[str, int] = {
    "vocab_size": VOCAB, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "prediction_length": 8, "topk_group": 1, "n_group": 1, "n_shared_experts": 1, "num_experts": 4, "top_k_experts": 2,
}  # fmt: skip
"""Fields that are None by default and without which no model can be built."""
MANY_AXES = re.compile(r"vl(_|$)|omni|glm\d*v")
"""Types whose positions have three axes even where the configuration does not say how many channels each gets."""
SKIPPED = frozenset(
    {"id2label", "label2id", "task_specific_params", "stage_names", "transformers_version", "_name_or_path"}
)


class Shrinker:
    """Shrinks a configuration's dictionary, nested ones too.

    `widths` returns the small width for a field and its value, None to keep all; `pictures` is the size of images, None
    to keep it.
    """

    def __init__(self, *, widths: Callable[[str, int], int] | None, pictures: int | None) -> None:
        self.widths, self.pictures = widths, pictures

    def shrink(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the small fields for those of a configuration."""
        picks = _layers_to_keep(given)
        small: dict[str, Any] = {}
        for at, (key, value) in enumerate(given.items()):
            if key in SKIPPED or key.startswith("_"):
                continue
            small[key] = self._value(key, value, given, picks, at)
        if "rope_parameters" in small and isinstance(small["rope_parameters"], dict):
            has_many_axes = "mrope_section" in small["rope_parameters"] or MANY_AXES.search(
                str(given.get("model_type"))
            )
            small["rope_parameters"] = (
                self._rope(small["rope_parameters"]) if has_many_axes else small["rope_parameters"]
            )
        return {**small, **_stages(given, small)}

    def _rope(self, rope: dict[str, Any]) -> dict[str, Any]:
        if self.widths is None:
            return rope
        half = HEAD_DIM // 2
        return {**rope, "mrope_section": [half - 2 * (half // 4), half // 4, half // 4]}

    def _value(self, key: str, value: Any, given: dict[str, Any], picks: list[int] | None, at: int) -> Any:
        if value is None:
            return ABSENT.get(key)
        if isinstance(value, float) and key in ("width_coefficient", "depth_coefficient"):
            return 1.0
        if key == "per_layer_config" and picks is not None:
            by_layer = cast("dict[Any, Any]", value)
            return {picks.index(int(i)): self.shrink(v) for i, v in by_layer.items() if int(i) in picks}
        if isinstance(value, dict):
            named = all(isinstance(k, str) for k in value)
            return self.shrink(value) if named and key != "rope_parameters" else value
        if isinstance(value, list):
            return self._list(key, value, given, picks)
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if LAYERS.match(key) and not NOT_LAYERS.search(key):
            return len(picks) if picks is not None and value == _depth(given) else min(value, 2)
        if WORDS.search(key):
            return min(value, VOCAB)
        if TOKEN.search(key):
            return _token(key, value, at)
        return self._size(key, value, given)

    def _size(self, key: str, value: int, given: dict[str, Any]) -> int:
        if self.pictures is not None and key in (
            "image_size",
            "pretrain_image_size",
            "input_size",
            "img_size",
        ):
            return self.pictures
        if self.widths is None:
            return value
        if self.pictures is not None and key in ("patch_size", "encoder_stride") and value > 8:
            return 8
        if key in FIXED:
            return int(min(value, FIXED[key])) if key not in ("max_window_layers",) else value
        if GROUPED.search(key):
            heads = next(
                (given[k] for k in ("num_attention_heads", "n_head", "num_heads") if k in given), value
            )
            return HEADS if value == heads else min(value, 2)
        if HEADED.match(key):
            return min(value, HEADS)
        if PLACES.match(key):
            return min(value, POSITIONS)
        return self.widths(key, value)

    def _list(self, key: str, value: list[Any], given: dict[str, Any], picks: list[int] | None) -> Any:
        if picks is not None and len(value) == _depth(given):
            return [value[i] for i in picks]
        if (
            key in ("image_size", "input_size")
            and self.pictures is not None
            and all(isinstance(v, int) for v in value)
        ):
            return [self.pictures] * len(value)
        if key in ("depths", "num_block_repeats", "stage_num_blocks", "layer_depths") and _ints(value):
            return [min(v, 1) for v in value]
        if key in ("mrope_section",):
            return self._rope({key: value})[key]
        if (
            self.widths is not None
            and _ints(value)
            and re.search(r"(hidden_sizes|_channels|embed_dims?|dims)$", key)
        ):
            return [v if v <= 4 else self.widths("channels_list", v) for v in value]
        return value


def _stages(given: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a backbone whose layers are its stages that select its last layers."""
    taken = given.get("out_indices")
    if not isinstance(taken, list) or "num_hidden_layers" not in given or "depths" in given:
        return {}
    layers = max(small["num_hidden_layers"], len(taken))
    return {
        "num_hidden_layers": layers,
        "out_indices": list(range(layers - len(taken) + 1, layers + 1)),
        "out_features": None,
    }


def _ints(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


def _token(key: str, value: int, at: int) -> int:
    named = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
    return value if value < 16 else named.get(key, VOCAB - 1 - at % 128)


def _depth(given: dict[str, Any]) -> int | None:
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth", "num_blocks"):
        if isinstance(given.get(key), int):
            return given[key]
    return None


def _layers_to_keep(given: dict[str, Any]) -> list[int] | None:
    """Return the first layer of each combination of kinds, two layers at least and four at most."""
    depth = _depth(given)
    if depth is None:
        return None
    lists = [v for v in given.values() if isinstance(v, list) and len(v) == depth]
    kinds: dict[str, int] = {}
    for i in range(depth):
        kinds.setdefault(repr([v[i] for v in lists]), i)
    picks = sorted(kinds.values())[:4]
    return picks if len(picks) > 1 else list(range(min(depth, 2)))


def _uniform(key: str, value: int) -> int:
    """Return one width for all, so that operands of products fit whatever the model does."""
    if WIDE.search(key):
        return min(value, FFN)
    if WIDTH.match(key) or key == "channels_list":
        return min(value, HIDDEN)
    return min(value, HEAD_DIM) if HEAD.match(key) else value


def _scaled(key: str, value: int) -> int:
    """Return a width divided by one number, so that equal ones stay equal and multiples stay multiples."""
    if WIDE.search(key) or WIDTH.match(key) or key == "channels_list":
        return value if value <= 32 else max(32, value // 8 // 16 * 16)
    return value


SHRINKERS: dict[str, Shrinker] = {
    "uniform": Shrinker(widths=_uniform, pictures=64),
    "scaled": Shrinker(widths=_scaled, pictures=64),
    "scaled, full pictures": Shrinker(widths=_scaled, pictures=None),
    "uniform, full pictures": Shrinker(widths=_uniform, pictures=None),
    "shallow": Shrinker(widths=None, pictures=None),
}


def model_types() -> list[str]:
    """Return the model types of transformers."""
    return sorted(configuration_auto.CONFIG_MAPPING_NAMES)


def with_base_model() -> frozenset[str]:
    """Return the model types that have a base model."""
    return frozenset(modeling_auto.MODEL_MAPPING_NAMES)


def config_class(model_type: str) -> type:
    """Return the configuration class of a model type."""
    return configuration_auto.CONFIG_MAPPING[model_type]


def config_fields(model_type: str) -> list[str]:
    """Return the names of the fields of a model type's configuration, and other names for them."""
    kind: Any = config_class(model_type)
    return [*kind().to_dict(), *getattr(kind, "attribute_map", {})]


def small_configs(model_type: str, overrides: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield configurations of a type, the smallest first; each is built when called, and may raise."""
    kind = config_class(model_type)

    def build(shrinker: Shrinker) -> Any:
        base = kind(**overrides.get("base", {}))
        given = shrinker.shrink(base.to_dict())
        given.update(overrides.get("config", {}))
        given.pop("model_type", None)
        return kind(**given)

    for name, shrinker in SHRINKERS.items():
        yield name, lambda shrinker=shrinker: build(shrinker)


def model_class(model_type: str) -> type[nn.Module] | None:
    """Return the class of a type's base model; for a type without one, the first of its models with a head."""
    names = [n for n in dir(modeling_auto) if n.startswith("MODEL") and n.endswith("MAPPING_NAMES")]
    names.sort(key=lambda n: (n != "MODEL_MAPPING_NAMES", n != "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", n))
    import transformers

    for name in names:
        entry = getattr(modeling_auto, name).get(model_type)
        for candidate in (entry,) if isinstance(entry, str) else (entry or ())[:1]:
            if candidate is not None and hasattr(transformers, candidate):
                return getattr(transformers, candidate)
    return _by_config(config_class(model_type))


def _by_config(kind: type) -> type[nn.Module] | None:
    """Return the model among the modules beside a configuration's that names this configuration as its own."""
    package = importlib.import_module(kind.__module__.rpartition(".")[0])
    models: list[type[nn.Module]] = []
    for file in sorted(Path(str(package.__file__)).parent.glob("modeling_*.py")):
        module = importlib.import_module(f"{package.__name__}.{file.stem}")
        classes: list[Any] = [m for m in vars(module).values() if inspect.isclass(m)]
        models += [m for m in classes if issubclass(m, nn.Module) and m.__module__ == module.__name__]
    own = [
        m
        for m in models
        if not m.__name__.endswith("PreTrainedModel")
        and m.forward is not nn.Module.forward
        and hasattr(m, "_from_config")
        and kind in (getattr(m, "config_class", None), _annotated(m))
    ]
    return min(own, key=lambda m: (not m.__name__.endswith("Model"), len(m.__name__)), default=None)


def _annotated(cls: type) -> Any:
    named = vars(cls).get("__annotations__", {}).get("config")
    return getattr(inspect.getmodule(cls), named, None) if isinstance(named, str) else named


def build_model(cls: type[nn.Module], config: Any) -> nn.Module:
    """Return a model with random weights, in eval mode; raise ValueError where it would be large."""
    with torch.device("meta"):
        count = sum(p.numel() for p in cls(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return cls(config).eval()
