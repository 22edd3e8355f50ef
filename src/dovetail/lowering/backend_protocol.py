"""The interface of backends, how they are named and resolved, kernels by kind, and checks that backends share."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, cast
from weakref import WeakValueDictionary

import torch
from torch import nn

from dovetail.errors import InvalidArgument, did_you_mean, nearest
from dovetail.ir.effects import summarize_body
from dovetail.ir.nodes import example_size
from dovetail.lowering.failures import LoweringFailure
from dovetail.numerics.compare import expected_outcome
from dovetail.outlining.region import Region, results
from dovetail.rules.rule import Decline, Rules

if TYPE_CHECKING:
    from dovetail.rules.library.library_rule import Kind

GROUP = "dovetail.backends"
Compiled = Callable[..., Any]
Answer = Decline | Literal[True]
_BUILT_IN = {
    "eager": ("dovetail.backends.eager", "Eager"),
    "torchscript": ("dovetail.backends.torchscript", "TorchScript"),
    "inductor": ("dovetail.backends.inductor", "Inductor"),
    "aoti": ("dovetail.backends.inductor", "Aoti"),
    "cuda_graphs": ("dovetail.backends.cuda_graphs", "CudaGraphs"),
    "int8": ("dovetail.backends.int8.int8_backend", "Int8"),
    "onnxruntime": ("dovetail.backends.external.onnxruntime", "OnnxRuntime"),
    "openvino": ("dovetail.backends.external.openvino", "OpenVino"),
    "tvm": ("dovetail.backends.external.tvm", "Tvm"),
    "xla": ("dovetail.backends.external.xla", "Xla"),
}
DEFAULT = ("inductor",)
"""The backends for `backends=None`."""
_WRAPPERS = ("cuda_graphs",)
"""Backends that wrap another one, whose name is in brackets."""


@dataclass(frozen=True)
class CompileCost:
    """A linear model of the seconds that a backend compiles: so many for each distinct body and each operation in it."""

    per_body: float
    per_operation: float

    def seconds(self, bodies: int, operations: int) -> float:
        """Return the estimate for bodies with so many operations in all."""
        return bodies * self.per_body + operations * self.per_operation


class Backend:
    """Compiles regions. Subclass it, or pass any object that has `name`, `supports` and `compile`.

    `kernels` maps kinds to functions: a backend that has only those need not override either method. A function gets
    the pattern's arguments by name where the region has them, else the operands in order, and all the region's
    attributes as keywords, except those it does not accept that have the default of a library kind. Its results are
    copied into the memory layout of the body's where they have another.

    `trains`: autograd can go through what `compile` returns; otherwise calls that need gradients run the body.
    `double_backward`: autograd can also differentiate the backward of that; otherwise such a backward is computed
    through the body. `version` is part of cache keys: change it when the generated code changes. With `isolation =
    "process"` compilation happens in a process of its own, which may crash, or exceed `timeout` seconds and be killed;
    `save` and `load` are required then. Inline, neither can be survived. `bound` is how far results may be off relative
    to their size when they are verified, for code that is less exact than the body. With `must_verify` code is verified
    whatever option `lower` got, and not used where that is not possible. `rules` find the regions for it in
    `dovetail.compile`. Regions of `smallest` operations are worth a call to it, whatever option `lower` got. `variants`
    are keywords of its constructor that `dovetail.tune` tries besides the defaults. By its `compile_cost`, if it has one,
    `dovetail.compile` decides between repeated blocks, each compiled once, and the whole graph.
    """

    name: str = ""
    version: str = "1"
    isolation: Literal["inline", "process"] = "inline"
    timeout: float | None = None
    trains: bool = False
    double_backward: bool = False
    kernels: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    bound: float | None = None
    must_verify: bool = False
    rules: Rules | None = None
    smallest: int | None = None
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ()
    compile_cost: CompileCost | None = None

    @property
    def options(self) -> Mapping[str, Any]:
        """What else the generated code depends on; part of cache keys by its `repr`."""
        return {}

    def supports(self, region: Region) -> Answer:
        """Return True, or a Decline with the reason."""
        if region.kind not in self.kernels:
            hint = near_kind(self.kernels, region.kind)
            return Decline(f"'{self.name}' has no kernel for kind '{region.kind}'{hint}")
        reason = misfit(self.kernels[region.kind], region)
        return True if reason is None else Decline(reason)

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        """Return a callable that takes the operands of the region's body and returns its results as a tuple.

        `examples` are fake tensors like the operands, with the gradient flags of the calls it will get.
        """
        return kernel_call(self.kernels[region.kind], region, examples)

    def compile_async(self, region: Region, examples: Sequence[Any]) -> Callable[[], Compiled]:
        """Start to compile as `compile` does, and return a function that waits for the end and returns the callable.

        A backend that overrides it works on several regions at a time. The function may never be called.
        """
        return functools.partial(self.compile, region, examples)

    def prepare(self, site: CallSite) -> Compiled:
        """Return what runs one call of a region from now on; asked at the first call, and after a weight changed.

        A backend that does not override it has nothing prepared, and weights are not watched for it.
        """
        return site.compiled

    def save(self, compiled: Any) -> bytes:
        """Return what `compile` returned as bytes for the disk cache or another process."""
        raise NotImplementedError(f"'{self.name}' has no `save`")

    def load(self, data: bytes, region: Region) -> Compiled:
        """Return the callable that `save` wrote; `region` is the one it was compiled for, or an equal one."""
        raise NotImplementedError(f"'{self.name}' has no `load`")

    def warm(self) -> None:
        """Start what every compilation needs, called by `dovetail.compile` before the model is captured."""

    def settle(self, lowered: nn.Module) -> None:
        """Look at a lowered graph once before it is returned: run it, to measure or to choose."""

    @property
    def can_save(self) -> bool:
        """Whether `save` and `load` are implemented."""
        return self.implements("save") and self.implements("load")

    def implements(self, hook: str) -> bool:
        """Return whether an optional method is overridden."""
        if not isinstance(hook, str) or not hasattr(Backend, hook):  # pyright: ignore[reportUnnecessaryIsInstance]
            otherwise = f"There are {', '.join(_METHODS)}."
            hint = did_you_mean(str(hook), _METHODS, otherwise=otherwise)
            raise InvalidArgument(f"a backend has no method {hook!r}. {hint}")
        method = getattr(self, hook)
        return callable(method) and getattr(method, "__func__", None) is not getattr(Backend, hook)

    def __repr__(self) -> str:
        return f"<backend {self.name}>"


@dataclass(frozen=True, eq=False)
class CallSite:
    """The argument of `Backend.prepare`: one call of a region, its compiled code, and the operands of its first call.

    `constants` are the positions of the operands that are parameters, buffers or constants of the model, or views of
    those. What is prepared is used until one of them is written or replaced; then it is prepared again. Writes that no
    version counter shows are noticed by contents within `weight_check_interval` calls: what is prepared is taken to
    copy all constants except those whose positions are in its attribute `reads_in_place`, if it has one. `notes` is
    for data needed when it is prepared again, or in copies and pickles of the graph; all calls of a graph share it.
    `tell` adds a reason to the record.
    """

    name: str
    region: Region
    compiled: Compiled
    operands: tuple[Any, ...]
    constants: frozenset[int]
    notes: dict[str, Any]
    tell: Callable[[str], None]


_HOOKS = frozenset(name for name in vars(Backend) if not name.startswith("_")) - {"can_save", "implements"}
_METHODS = sorted(name for name in _HOOKS if callable(getattr(Backend, name)))


class _Adapter(Backend):
    """A backend that is not a subclass: its own attributes and methods, the defaults of `Backend` for the others."""

    def __init__(self, wrapped: object) -> None:
        self.wrapped = wrapped

    def __getattribute__(self, name: str) -> Any:
        if name in _HOOKS:
            wrapped = object.__getattribute__(self, "wrapped")
            value = getattr(wrapped, name, None)
            if value is not None:
                return value
        return object.__getattribute__(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _adapted, (self.wrapped,)

    def __repr__(self) -> str:
        return repr(self.wrapped)


_ADAPTERS: WeakValueDictionary[int, _Adapter] = WeakValueDictionary()


def _adapted(value: Any) -> Backend:
    """Return an object with the methods of a backend as a Backend; the same one each time."""
    if isinstance(value, Backend):
        return value
    # The adapter keeps the object alive, so that its id is not used again.
    return _ADAPTERS.setdefault(id(value), _Adapter(value))


def is_backend(value: object) -> bool:
    """Return whether an object has what a backend must have."""
    return isinstance(getattr(value, "name", None), str) and all(
        callable(getattr(value, method, None)) for method in ("supports", "compile")
    )


def backend_class(backend: Backend) -> type:
    """Return the class that implements a backend, which need not be a subclass of Backend."""
    return type(backend.wrapped if isinstance(backend, _Adapter) else backend)


def identity(backend: Backend) -> str:
    """Return what distinguishes the code of one backend from that of another, in any process."""
    kind = backend_class(backend)
    options = sorted((backend.options or {}).items())
    return f"{kind.__module__}.{kind.__qualname__} {backend.name} {backend.version} {options!r}"


class BackendObject(Protocol):
    """The least that an object passed as a backend must have."""

    name: str

    def supports(self, region: Region) -> Answer: ...

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled: ...


BackendLike: TypeAlias = str | Backend | BackendObject
"""A backend, or the name of one."""
BackendChain: TypeAlias = BackendLike | Iterable[BackendLike]
"""One backend, or an ordered preference."""
Backends: TypeAlias = BackendChain | Mapping[str, BackendChain]
"""An ordered preference for all regions, or one by region name, body key or kind."""


def resolve(value: Any) -> tuple[Backend, ...]:
    """Return backends for a name, a backend, or a list of those; raise InvalidArgument for anything else."""
    if isinstance(value, str) or is_backend(value):
        return (_resolve_one(value),)
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise _not_a_backend(value)
    backends = tuple(_resolve_one(v) for v in cast("Iterable[Any]", value))
    names = [b.name for b in backends]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise InvalidArgument(f"two backends are named '{twice}'; the ledger could not tell them apart.")
    return backends


def checked_backends(backends: Any) -> Any:
    """Return backends as they were passed, after checking them: the default for None, and None for an empty list."""
    if isinstance(backends, (list, tuple)) and not backends:
        return None
    if isinstance(backends, Mapping):
        raise InvalidArgument(
            "a mapping by kind is for `lower` and `compile`; give a backend or a list of them."
        )
    backends = cast("Any", DEFAULT if backends is None else backends)
    resolve(backends)
    return backends


def built_in() -> Mapping[str, tuple[str, str]]:
    """Return the module and the class of each backend that comes with dovetail, by its name."""
    return _BUILT_IN


def backend_names() -> tuple[str, ...]:
    """Return the names of the built-in backends and of those that installed packages register."""
    installed = sorted({point.name for point in entry_points(group=GROUP)} - _BUILT_IN.keys())
    return (*_BUILT_IN, *installed)


def why_unusable(backend: Backend) -> str | None:
    """Return what a backend needs that this process does not have, such as a package to install; None if it has all.

    A backend reports it by a method `missing`, if it has one.
    """
    adapted: Any = backend
    missing: Callable[[], str | None] | None = getattr(adapted, "missing", None)
    return None if missing is None else missing()


def _resolve_one(value: Any) -> Backend:
    if isinstance(value, str):
        backend = by_name(value)
    elif is_backend(value):
        backend = _adapted(value() if isinstance(value, type) else value)
    else:
        raise _not_a_backend(value)
    if not backend.name:
        kind = value if isinstance(value, type) else type(value)
        raise InvalidArgument(f"the backend {kind.__qualname__} has no name.")
    if backend.isolation not in ("inline", "process"):
        raise InvalidArgument(
            f"backend '{backend.name}': isolation {backend.isolation!r}; give 'inline' or 'process'."
        )
    if backend.compile_cost is not None and not isinstance(backend.compile_cost, CompileCost):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(
            f"backend '{backend.name}': compile_cost {backend.compile_cost!r}; give a CompileCost or None."
        )
    if backend.isolation == "process" and not backend.can_save:
        raise InvalidArgument(
            f"backend '{backend.name}' compiles in a process of its own and so needs `save` and `load`."
        )
    return backend


def _not_a_backend(value: Any) -> InvalidArgument:
    return InvalidArgument(
        f"{value!r} is not a backend: give a name, or an object with `name`, `supports` and `compile`."
    )


@functools.cache
def by_name(name: str) -> Backend:
    """Return the built-in backend or the one of an installed package of this name; one object for each name."""
    provider = _provider(name)
    # A package may register a class, a function that returns a backend, or a backend.
    return _adapted(provider() if isinstance(provider, type) or not is_backend(provider) else provider)


def backend_with_options(name: str, options: Mapping[str, Any]) -> Backend:
    """Return the backend of a name, constructed with options as keywords; one object for each name and options.

    Options are values that JSON has, sequences are passed as lists. Raises InvalidArgument for options that the
    backend does not take.
    """
    if not options:
        return _resolve_one(name)
    try:
        text = json.dumps(options, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"options of the backend '{name}' have no JSON form: {error}.") from error
    return _with_options(name, text)


@functools.cache
def _with_options(name: str, options_json: str) -> Backend:
    provider, options = _provider(name), cast("dict[str, Any]", json.loads(options_json))
    if is_backend(provider) and not isinstance(provider, type):
        raise InvalidArgument(f"the backend '{name}' takes no options, and was given {', '.join(options)}.")
    signature = inspect.signature(provider)
    try:
        signature.bind(**options)
    except TypeError as error:
        known = list(signature.parameters)
        unknown = next((option for option in options if option not in known), None)
        if unknown is not None:
            has = f"It takes {', '.join(known)}." if known else "It takes none."
            hint = did_you_mean(unknown, known, otherwise=has)
            raise InvalidArgument(f"the backend '{name}' has no option '{unknown}'. {hint}") from error
    try:
        backend = provider(**options)
    except InvalidArgument:  # names option and value
        raise
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"the backend '{name}' cannot be constructed: {error}.") from error
    return _resolve_one(backend)


def _provider(name: str) -> Any:
    """Return what constructs the backend of a name: a class or function, or for an installed package a backend."""
    outer, _, inner = name.partition("(")
    if outer in _BUILT_IN and (not inner or outer in _WRAPPERS):
        module, attribute = _BUILT_IN[outer]
        built_in_class = getattr(import_module(module), attribute)
        return functools.partial(built_in_class, inner.removesuffix(")")) if inner else built_in_class
    installed = {point.name: point for point in entry_points(group=GROUP)}
    if name in installed:
        try:
            return installed[name].load()
        except Exception as error:
            raise InvalidArgument(
                f"backend '{name}' ({installed[name].value}) cannot be loaded: {error}"
            ) from error
    known = sorted(backend_names())
    hint = did_you_mean(name, known, otherwise=f"There are {', '.join(known)}.")
    raise InvalidArgument(f"there is no backend '{name}'. {hint}")


class Unfit(LoweringFailure):
    """A kernel cannot be called for a region, or did not return what the region needs; the message is the reason."""


def kernel_call(
    kernel: Callable[..., Any], region: Region, examples: Sequence[Any] | None = None
) -> Compiled:
    """Return a callable with the operands of a region's body that calls `kernel` by the pattern's argument names.

    Without names the operands are passed in order. Attributes are passed by keyword; one that the kernel does not
    accept is left out if it has the default of the kind. Results are put into the order of the body's and, with
    `examples` of the operands, into its memory layout. Raises Unfit with the reason that `misfit` returns.
    """
    reason = misfit(kernel, region)
    if reason is not None:
        raise Unfit(reason)
    named = tuple(region.arguments.items())
    keywords = _keywords(kernel, region)
    order = cast("tuple[int, ...]", region.results)
    outputs = len(results(region.body))
    count = max(order) + 1 if order else outputs
    layouts = [None] * outputs if examples is None else _layouts(region, examples)

    def call(*operands: Any) -> tuple[Any, ...]:
        if named:
            returned = kernel(**{name: operands[number] for name, number in named}, **keywords)
        else:
            returned = kernel(*operands, **keywords)
        flat = _as_sequence(returned)
        if len(flat) < count or (not order and len(flat) > count):
            raise Unfit(f"the kernel returned {len(flat)} results where the region has {count}")
        flat = [flat[k] for k in order] if order else flat
        return tuple(_with_layout(value, layout) for value, layout in zip(flat, layouts, strict=True))

    return call


def _layouts(region: Region, examples: Sequence[Any]) -> list[tuple[int, ...] | None]:
    """Return the dimensions of each result of a body from outermost to innermost in memory; None for other values."""
    effects = summarize_body(region.body)
    if effects.host_effect:
        return [None] * len(results(region.body))
    expected = expected_outcome(region.body, effects, examples, grad=False).outputs
    return [_dimension_order(value) if isinstance(value, torch.Tensor) else None for value in expected]


def _dimension_order(value: torch.Tensor) -> tuple[int, ...]:
    strides = [example_size(stride) for stride in value.stride()]
    return tuple(sorted(range(value.dim()), key=lambda i: -strides[i]))


def _with_layout(value: Any, order: tuple[int, ...] | None) -> Any:
    """Return a result with its dimensions in this order in memory, copied only if they are not."""
    if order is None or not isinstance(value, torch.Tensor) or value.dim() != len(order):
        return value
    if order == tuple(range(len(order))):
        return value.contiguous()
    outer_first = value.permute(order)
    if outer_first.is_contiguous():
        return value
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return outer_first.contiguous().permute(inverse)


def misfit(kernel: Callable[..., Any], region: Region) -> str | None:
    """Return why a kernel cannot replace a region; None if it can be called for it.

    Either all operands have names or none has, sizes aside where the kind is the library's. The kernel must accept
    all of them and every attribute that does not have the default of its kind. If it ignores an attribute, it may
    have no parameter that the kind lacks, for that may be the same one under another name. No inner value may be used
    outside, which only the body computes.
    """
    operands = [n.name for n in region.body.graph.nodes if n.op == "placeholder"]
    named, contract = region.arguments, contract_of(region)
    unnamed = [name for i, name in enumerate(operands) if i not in named.values()] if named else []
    if unnamed and contract is None:
        return f"its operand '{unnamed[0]}' is not an argument of the pattern ({', '.join(named)})"
    both = sorted(named.keys() & region.attrs.keys())
    if both:
        return f"'{both[0]}' is an argument and an attribute at once"
    if any(k is None for k in region.results):
        inner = region.results.index(None)
        return f"its result {inner} is an inner value, which a kernel for the whole region does not compute"
    try:
        signature = inspect.signature(kernel)
    except (TypeError, ValueError):
        return None  # a builtin without a signature; the trial run decides
    foreign = _foreign(kernel, region)
    positional, keywords = () if named else tuple(operands), _keywords(kernel, region)
    try:
        signature.bind(*positional, **dict.fromkeys(named), **keywords)
    except TypeError as error:
        passed = ", ".join(named or operands) or "nothing"
        attrs = f" and the attributes {', '.join(region.attrs)}" if region.attrs else ""
        required = {*named, *keywords} - signature.parameters.keys()
        hint = _near_names(foreign, required)
        return f"the kernel cannot be called with {passed}{attrs}: {error}{hint}"
    ignored = region.attrs.keys() - keywords.keys()
    if ignored and foreign:
        return (
            f"the kernel's parameter '{foreign[0]}' does not belong to the kind '{region.kind}' and may be an attribute "
            f"that it ignores ({', '.join(sorted(ignored))}){_near_names(foreign, ignored)}: use the kind's "
            f"names, take **attributes, or bind it by functools.partial"
        )
    return None


def _library_kinds() -> Mapping[str, Kind]:
    # Imported lazily: only backends with kernels by kind pay for tracing the library's patterns.
    from dovetail.rules.library import KINDS

    return KINDS


def contract_of(region: Region) -> Kind | None:
    """Return the library kind of a region; None without one, or if it has unnamed operands other than sizes."""
    contract = _library_kinds().get(region.kind)
    if contract is None or not contract.describes(region.version, region.arguments, region.attrs):
        return None
    values = [n.meta.get("val") for n in region.body.graph.nodes if n.op == "placeholder"]
    operands = {i for i, value in enumerate(values) if not isinstance(value, (int, torch.SymInt))}
    return contract if region.results and operands <= set(region.arguments.values()) else None


def near_kind(kernels: Collection[str], kind: str) -> str:
    """Return a hint for a kind without a kernel: a misspelled kind in the table that is close to it."""
    near = nearest(kind, [name for name in kernels if name not in _library_kinds()], most=1)
    return f"; it has one for '{near[0]}': did you mean '{kind}'?" if near else ""


def _foreign(kernel: Callable[..., Any], region: Region) -> list[str]:
    """Return the unbound parameters of a kernel that are not arguments or attributes of the region or its kind."""
    contract = _library_kinds().get(region.kind)
    names = {*region.arguments, *region.attrs, *(contract.arguments if contract is not None else ())}
    names.update(kernel.keywords if isinstance(kernel, functools.partial) else ())
    parameters = inspect.signature(kernel).parameters.values()
    return [p.name for p in parameters if p.name not in names and p.kind not in _VARIADIC]


def _near_names(foreign: Iterable[str], required: Collection[str]) -> str:
    """Return a hint for foreign parameters whose names are close to a required one."""
    hints: list[str] = []
    for name in foreign:
        abbreviated = [r for r in sorted(required) if name.startswith(r) or r.startswith(name)]
        near = abbreviated or nearest(name, sorted(required), most=1)
        hints += [f"'{name}' may be meant for '{near[0]}'"] if near else []
    return f"; {', '.join(hints)}" if hints else ""


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _keywords(kernel: Callable[..., Any], region: Region) -> Mapping[str, Any]:
    """Return the keywords of a kernel call besides the operands.

    These are the attributes, without those it does not accept that have the kind's default, and None for each absent
    argument of the kind that it has a default for, whatever that default is.
    """
    contract = contract_of(region)
    if contract is None:
        return region.attrs
    try:
        parameters = inspect.signature(kernel).parameters
    except (TypeError, ValueError):
        return region.attrs
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        attrs = dict(region.attrs)
    else:
        attrs = {
            name: value
            for name, value in region.attrs.items()
            if name in parameters or not contract.is_default(name, value)
        }
    from dovetail.rules.library.library_rule import Required

    absent = [name for name in contract.arguments if name in parameters and name not in region.arguments]
    return attrs | {name: None for name in absent if parameters[name].default is not Required}


def _as_sequence(returned: Any) -> Sequence[Any]:
    if isinstance(returned, torch.Tensor):
        return (returned,)
    if isinstance(returned, (tuple, list)):
        return cast("Sequence[Any]", returned)
    raise Unfit(f"the kernel returned a {type(returned).__name__}, neither a tensor nor a tuple of them")


def load_package(name: str) -> Any:
    """Import an optional package when it is needed."""
    return import_module(name)


@functools.cache
def package_version(package: str) -> str:
    """Return the version of a package for cache keys."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
