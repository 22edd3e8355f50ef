"""The models of the comparison of compilers, and each compiler on a whole model without dovetail."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Args = tuple[torch.Tensor, ...]
LARGE = ("BERT base 1×128", "ResNet-50 1×224", "Llama 8×512 1×64")


class Only(nn.Module):
    """A model of Hugging Face's that returns one tensor."""

    def __init__(self, model: nn.Module, field: str) -> None:
        super().__init__()
        self.model, self.field = model, field

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.model(x)[self.field]
        return value


def build(name: str) -> tuple[nn.Module, Args]:
    """A model in eval mode with random weights, and its inputs; a name of the zoo is of size small, batch 1."""
    torch.manual_seed(0)
    if name == LARGE[0]:
        from transformers import BertConfig, BertModel

        model: nn.Module = Only(BertModel(BertConfig()), "last_hidden_state")
        return model.eval(), (torch.randint(0, 30000, (1, 128)),)
    if name == LARGE[1]:
        from transformers import ResNetConfig, ResNetForImageClassification

        model = Only(ResNetForImageClassification(ResNetConfig(num_labels=1000)), "logits")
        return model.eval(), (torch.randn(1, 3, 224, 224),)
    if name == LARGE[2]:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )
        return Only(LlamaForCausalLM(config), "logits").eval(), (torch.randint(0, 32000, (1, 64)),)
    from dovetail import zoo

    entry = zoo.get(name)
    model, given = entry.build("small").eval(), entry.example_inputs("small", batch=1)
    return model, inspect.signature(model.forward).bind(*given.args, **given.kwargs).args


def alone(compiler: str, model: nn.Module, args: Args) -> Callable[..., Any]:
    """A compiler on the whole model, the way its own documentation has it."""
    return _ALONE[compiler](model, args)


def _onnxruntime(model: nn.Module, args: Args) -> Callable[..., Any]:
    import onnxruntime as ort

    program: Any = torch.onnx.export(model, args, dynamo=True, verbose=False)
    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = torch.get_num_threads(), 3
    session = ort.InferenceSession(
        program.model_proto.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    names = [i.name for i in session.get_inputs()]

    def run(*given: torch.Tensor) -> Any:
        results = session.run(None, dict(zip(names, (g.numpy() for g in given), strict=True)))
        return tuple(map(torch.from_numpy, results))

    return run


def _openvino(model: nn.Module, args: Args) -> Callable[..., Any]:
    import openvino as ov

    converted = ov.convert_model(torch.export.export(model, args))
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = ov.compile_model(converted, "CPU", settings).create_infer_request()

    def run(*given: torch.Tensor) -> Any:
        results = request.infer([g.numpy() for g in given], share_inputs=True)
        return tuple(torch.from_numpy(results[i]) for i in range(len(results)))

    return run


def _tvm(model: nn.Module, args: Args) -> Callable[..., Any]:
    import tvm
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    module = from_exported_program(torch.export.export(model, args))
    module = relax.get_pipeline("zero")(module)
    machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())

    def run(*given: torch.Tensor) -> Any:
        results = machine["main"](*(tvm.runtime.from_dlpack(g) for g in given))
        return torch.from_dlpack(results[0])

    return run


_ALONE: dict[str, Callable[[nn.Module, Args], Callable[..., Any]]] = {
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
    "tvm": _tvm,
}
