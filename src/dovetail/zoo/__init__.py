"""Small models in plain torch for demos, tests and benchmarks; importing builds none of them."""

from dataclasses import dataclass as _dataclass

from . import bert, inception, llama, lstm, mamba, mlp, moe, resnet, vit
from .common import Build as _Build
from .common import ExampleInputs as _ExampleInputs
from .common import Inputs

__all__ = ["MODELS", "Inputs", "ZooModel", "get", "names"]


@_dataclass(frozen=True)
class ZooModel:
    """A model of the zoo: how to make it, and how to make inputs for it."""

    name: str
    build: _Build
    example_inputs: _ExampleInputs
    doc: str


_ROWS = (
    ZooModel("mlp", mlp.build, mlp.example_inputs, "MLP with pre-norm residual blocks"),
    ZooModel("llama", llama.build, llama.example_inputs, "decoder: RMSNorm, rotary, grouped queries, SwiGLU"),
    ZooModel("bert", bert.build, bert.example_inputs, "encoder: post-norm, attention by hand, GELU, pooler"),
    ZooModel("resnet", resnet.build, resnet.example_inputs, "basic blocks with BatchNorm and in-place ReLU"),
    ZooModel(
        "inception", inception.build, inception.example_inputs, "parallel convolution branches, concatenated"
    ),
    ZooModel("vit", vit.build, vit.example_inputs, "vision transformer with a class token"),
    ZooModel("mamba", mamba.build, mamba.example_inputs, "selective scan, unrolled over time"),
    ZooModel("lstm", lstm.build, lstm.example_inputs, "LSTM from its gates, unrolled over time"),
    ZooModel("moe", moe.build, moe.example_inputs, "dense mixture of experts that counts its routing"),
)

MODELS: dict[str, ZooModel] = {row.name: row for row in _ROWS}


def names() -> tuple[str, ...]:
    """Return the names of the models."""
    return tuple(MODELS)


def get(name: str) -> ZooModel:
    """Return the model of a name."""
    if name not in MODELS:
        raise ValueError(f"unknown model '{name}'; the models are {', '.join(MODELS)}")
    return MODELS[name]


def __dir__() -> list[str]:
    return sorted(__all__)
