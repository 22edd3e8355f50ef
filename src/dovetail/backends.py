"""The backends that come with dovetail, as classes to be given options: `Inductor()`, `Int8(...)`, `OnnxRuntime(...)`.

Each is imported, with what it needs, when it is asked for. By name, with their defaults, they are "inductor", "int8",
"onnxruntime" and so on.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from dovetail.lowering.backend import Backend
from dovetail.lowering.backend import built_in as _built_in

if _TYPE_CHECKING:
    from dovetail.lowering.backends.aoti import Aoti
    from dovetail.lowering.backends.cuda_graphs import CudaGraphs
    from dovetail.lowering.backends.eager import Eager
    from dovetail.lowering.backends.inductor import Inductor
    from dovetail.lowering.backends.int8 import Int8
    from dovetail.lowering.backends.onnxruntime import OnnxRuntime
    from dovetail.lowering.backends.openvino import OpenVino
    from dovetail.lowering.backends.torchscript import TorchScript
    from dovetail.lowering.backends.tvm import Tvm
    from dovetail.lowering.backends.xla import Xla

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
