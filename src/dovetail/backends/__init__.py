"""The built-in backends as classes that take options: `Inductor()`, `Int8(...)`, `OnnxRuntime(...)`.

Each is imported, with its dependencies, on first use. By name ("inductor", "int8", "onnxruntime") they have default options.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from dovetail.lowering.backend_protocol import Backend
from dovetail.lowering.backend_protocol import built_in as _built_in

if _TYPE_CHECKING:
    from dovetail.backends.cuda_graphs import CudaGraphs
    from dovetail.backends.eager import Eager
    from dovetail.backends.external.onnxruntime import OnnxRuntime
    from dovetail.backends.external.openvino import OpenVino
    from dovetail.backends.external.tvm import Tvm
    from dovetail.backends.external.xla import Xla
    from dovetail.backends.inductor import Aoti, Inductor
    from dovetail.backends.int8.int8_backend import Int8
    from dovetail.backends.torchscript import TorchScript

__all__ = [
    "Aoti",
    "Backend",
    "CudaGraphs",
    "Eager",
    "Inductor",
    "Int8",
    "OnnxRuntime",
    "OpenVino",
    "TorchScript",
    "Tvm",
    "Xla",
]


def __getattr__(name: str) -> type[Backend]:
    import importlib

    from dovetail.errors import did_you_mean

    place = next((p for p in _built_in().values() if p[1] == name), None)
    if place is None:
        hint = did_you_mean(name, __all__)
        raise AttributeError(f"module 'dovetail.backends' has no attribute {name!r}. {hint}".rstrip(" "))
    value = globals()[name] = getattr(importlib.import_module(place[0]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
