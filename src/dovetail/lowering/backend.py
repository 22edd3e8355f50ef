"""What a backend is: something that says what it takes, and makes a callable of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, cast

from dovetail.errors import InvalidArgument, did_you_mean
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline

GROUP = "dovetail.backends"
Compiled = Callable[..., Any]
Answer = Decline | Literal[True]

_BUILT_IN = {
    "eager": ("dovetail.lowering.backends.eager", "Eager"),
    "torchscript": ("dovetail.lowering.backends.torchscript", "TorchScript"),
    "inductor": ("dovetail.lowering.backends.inductor", "Inductor"),
    "aoti": ("dovetail.lowering.backends.aoti", "Aoti"),
    "cuda_graphs": ("dovetail.lowering.backends.cuda_graphs", "CudaGraphs"),
    "int8": ("dovetail.lowering.backends.int8", "Int8"),
    "onnxruntime": ("dovetail.lowering.backends.onnxruntime", "OnnxRuntime"),
    "openvino": ("dovetail.lowering.backends.openvino", "OpenVino"),
    "tvm": ("dovetail.lowering.backends.tvm", "Tvm"),
    "xla": ("dovetail.lowering.backends.xla", "Xla"),
}

DEFAULT = ("inductor",)
"""What `backends=None` stands for wherever backends are given."""

_AROUND = ("cuda_graphs",)
"""Backends around another one, whose name stands in brackets."""


class Backend:
    """Makes fast code of regions. Subclass it, or pass any object that has `name`, `supports` and `compile`.

    `kernels` maps kinds to functions: a backend that has only those need not write either method. A function gets
    the pattern's arguments by name where the region has them, else the operands in order, and all the region's
    attributes as keywords, save those it does not take that have the default of a library kind. Its results are copied
    into the memory layout of the body's where they have another. `trains` says that autograd can go through what
    `compile` returns; without it, calls that need gradients run the body.
    `double_backward` says that autograd can also differentiate the backward of that; without it, a backward that is
    differentiated is computed through the body. `version` is part of cache keys: change it when the generated code
    changes.
    With `isolation = "process"` compiling happens in a process of its own, which may crash, or take longer than
    `timeout` seconds and be killed; `save` and `load` are needed then. Inline, neither can be survived.

    Code that is not meant to be as exact as the body has a `bound`: how far results may be off, relative to their
    size, when they are verified. `rules` find the regions it wants in `dovetail.compile`. Regions of `smallest`
    operations are worth a call to it whatever `lower` was told.
    """

    name: str = ""
    version: str = "1"
    isolation: Literal["inline", "process"] = "inline"
    timeout: float | None = None
    trains: bool = False
    double_backward: bool = False
    kernels: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    bound: float | None = None
    rules: Any = None
    smallest: int | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """What else the generated code depends on; part of cache keys, so its `repr` must tell all."""
        return {}

    def supports(self, region: Region) -> Answer:
        """True, or a Decline with the reason."""
        from dovetail.lowering.kernels import misfit, near_kind

        if region.kind not in self.kernels:
            hint = near_kind(self.kernels, region.kind)
            return Decline(f"'{self.name}' has no kernel for kind '{region.kind}'{hint}")
        reason = misfit(self.kernels[region.kind], region)
        return True if reason is None else Decline(reason)

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        """A callable that takes the operands of the region's body and returns its results as a tuple.

        `examples` are fake tensors like the operands, with the gradient flags of the calls it will get.
        """
        from dovetail.lowering.kernels import kernel_call

        return kernel_call(self.kernels[region.kind], region, examples)

    def __repr__(self) -> str:
        return f"<backend {self.name}>"


def is_backend(value: object) -> bool:
    """Whether an object can be asked and told to compile."""
    return isinstance(getattr(value, "name", None), str) and all(
        callable(getattr(value, method, None)) for method in ("supports", "compile")
    )


def setting(backend: Any, name: str) -> Any:
    """An optional attribute of a backend, with the default that `Backend` has."""
    return getattr(backend, name, getattr(Backend, name))


def options_of(backend: Any) -> Mapping[str, Any]:
    return getattr(backend, "options", None) or {}


def saves(backend: Any) -> bool:
    """Whether what it compiles can be written to disk and read back."""
    return callable(getattr(backend, "save", None)) and callable(getattr(backend, "load", None))


def identity(backend: Any) -> str:
    """What tells the code of one backend from that of another, in any process."""
    kind = type(backend)
    options = sorted(options_of(backend).items())
    return f"{kind.__module__}.{kind.__qualname__} {backend.name} {setting(backend, 'version')} {options!r}"


def resolve(value: Any) -> tuple[Any, ...]:
    """Backends from a name, a backend, or a list of those; InvalidArgument names what is none."""
    if isinstance(value, str) or is_backend(value):
        return (_one(value),)
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise InvalidArgument(
            f"{value!r} is no backend: give a name, or an object with `name`, `supports` and `compile`."
        )
    made = tuple(_one(v) for v in cast("Iterable[Any]", value))
    names = [b.name for b in made]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise InvalidArgument(f"two backends are named '{twice}'; the ledger could not tell them apart.")
    return made


def requested(backends: Any) -> Any:
    """Backends as they were given, checked: the default for None, and None for none at all."""
    if isinstance(backends, (list, tuple)) and not backends:
        return None
    if isinstance(backends, Mapping):
        raise InvalidArgument(
            "a mapping by kind is for `lower` and `compile`; give a backend or a list of them."
        )
    given: Any = DEFAULT if backends is None else backends
    resolve(given)
    return given


def built_in() -> Mapping[str, tuple[str, str]]:
    """The module and the class of each backend that comes with dovetail, by its name."""
    return _BUILT_IN


def _one(value: Any) -> Any:
    if isinstance(value, str):
        return _checked(by_name(value))
    if is_backend(value):
        return _checked(value)
    if isinstance(value, type) and is_backend(value):
        return _checked(value())
    raise InvalidArgument(
        f"{value!r} is no backend: give a name, or an object with `name`, `supports` and `compile`."
    )


def _checked(backend: Any) -> Any:
    if isinstance(backend, type):
        backend = backend()
    if not backend.name:
        raise InvalidArgument(f"the backend {type(backend).__qualname__} has no name.")
    isolation = setting(backend, "isolation")
    if isolation not in ("inline", "process"):
        raise InvalidArgument(
            f"backend '{backend.name}': isolation {isolation!r}; give 'inline' or 'process'."
        )
    if isolation == "process" and not saves(backend):
        raise InvalidArgument(
            f"backend '{backend.name}' compiles in a process of its own and so needs `save` and `load`."
        )
    return backend


@functools.cache
def by_name(name: str) -> Any:
    """A backend that comes with dovetail, or that an installed package brings; one object for each name."""
    outer, _, inner = name.partition("(")
    if outer in _BUILT_IN and (not inner or outer in _AROUND):
        module, attribute = _BUILT_IN[outer]
        made = getattr(import_module(module), attribute)
        return made(inner.removesuffix(")")) if inner else made()
    brought = {point.name: point for point in entry_points(group=GROUP)}
    if name in brought:
        try:
            made = brought[name].load()
        except Exception as error:
            raise InvalidArgument(
                f"backend '{name}' ({brought[name].value}) cannot be loaded: {error}"
            ) from error
        return made() if isinstance(made, type) or not is_backend(made) else made
    known = sorted({*_BUILT_IN, *brought})
    hint = did_you_mean(name, known, otherwise=f"There are {', '.join(known)}.")
    raise InvalidArgument(f"there is no backend '{name}'. {hint}")
