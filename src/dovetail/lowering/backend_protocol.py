"""What a backend is: something that says what it takes, and makes a callable of it."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from dovetail.errors import InvalidArgument, did_you_mean, nearest
from dovetail.ir.effects import effects, summary
from dovetail.ir.nodes import is_number
from dovetail.lowering.failures import LoweringFailure
from dovetail.numerics.compare import expected_of
from dovetail.numerics.sample_inputs import hint_of
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline

if TYPE_CHECKING:
    from dovetail.rules.library.library_rule import Kind

GROUP = "dovetail.backends"
Compiled = Callable[..., Any]
Answer = Decline | Literal[True]
_BUILT_IN = {
    "eager": ("dovetail.backends.eager", "Eager"),
    "torchscript": ("dovetail.backends.torchscript", "TorchScript"),
    "inductor": ("dovetail.backends.inductor", "Inductor"),
    "aoti": ("dovetail.backends.aoti", "Aoti"),
    "cuda_graphs": ("dovetail.backends.cuda_graphs", "CudaGraphs"),
    "int8": ("dovetail.backends.int8.int8_backend", "Int8"),
    "onnxruntime": ("dovetail.backends.external.onnxruntime", "OnnxRuntime"),
    "openvino": ("dovetail.backends.external.openvino", "OpenVino"),
    "tvm": ("dovetail.backends.external.tvm", "Tvm"),
    "xla": ("dovetail.backends.external.xla", "Xla"),
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

        if region.kind not in self.kernels:
            hint = near_kind(self.kernels, region.kind)
            return Decline(f"'{self.name}' has no kernel for kind '{region.kind}'{hint}")
        reason = misfit(self.kernels[region.kind], region)
        return True if reason is None else Decline(reason)

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        """A callable that takes the operands of the region's body and returns its results as a tuple.

        `examples` are fake tensors like the operands, with the gradient flags of the calls it will get.
        """

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


class Unfit(LoweringFailure):
    """A kernel cannot be called for a region, or did not give what a region needs; the reason is its text."""


def kernel_call(
    kernel: Callable[..., Any], region: Region, examples: Sequence[Any] | None = None
) -> Compiled:
    """A callable with the operands of a region's body that calls `kernel` by the names of the pattern's arguments.

    Without names the operands go in order. Attributes go by keyword; one that the kernel does not take is left out
    where it has the default of the kind. Results are put into the order of the body's and, given `examples` of the
    operands, into the memory layout of the body's: copied where the kernel's has another order of dimensions. Raises
    Unfit with the reason that `misfit` gives.
    """
    reason = misfit(kernel, region)
    if reason is not None:
        raise Unfit(reason)
    named = tuple(region.arguments.items())
    keywords = _keywords(kernel, region)
    order = cast("tuple[int, ...]", region.results)
    count = max(order) + 1 if order else len(_results(region))
    layouts = [None] * len(_results(region)) if examples is None else _layouts(region, examples)

    def call(*operands: Any) -> tuple[Any, ...]:
        if named:
            results = kernel(**{name: operands[number] for name, number in named}, **keywords)
        else:
            results = kernel(*operands, **keywords)
        flat = _flat(results)
        if len(flat) < count or (not order and len(flat) > count):
            raise Unfit(f"the kernel returned {len(flat)} results where the region has {count}")
        flat = [flat[k] for k in order] if order else flat
        return tuple(_laid_out(value, layout) for value, layout in zip(flat, layouts, strict=True))

    return call


def _layouts(region: Region, examples: Sequence[Any]) -> list[tuple[int, ...] | None]:
    """The dimensions of each result of a body from the outermost to the innermost in memory; None for no tensor."""
    effects = summary(region.body)
    if effects.world:
        return [None] * len(_results(region))
    expected = expected_of(region.body, effects, examples, grad=False).outputs
    return [_dimension_order(value) if isinstance(value, torch.Tensor) else None for value in expected]


def _dimension_order(value: torch.Tensor) -> tuple[int, ...]:
    strides = [hint_of(stride) for stride in value.stride()]
    return tuple(sorted(range(value.dim()), key=lambda i: -strides[i]))


def _laid_out(value: Any, order: tuple[int, ...] | None) -> Any:
    """A result with its dimensions in this order in memory; itself where it has that already, or is none such."""
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
    """Why a kernel cannot stand for a region; None if it can be called for it.

    Every operand must have a name or none, sizes aside where the kind is the library's; the kernel must take all of
    them and every attribute that does not have the default of its kind, for one that it overlooks may be what makes
    the difference; where it overlooks one, it may have no parameter that the kind does not have, for that may be the
    same under another name; and no inner value may be used outside, which only the body computes.
    """
    operands = [n.name for n in region.body.graph.nodes if n.op == "placeholder"]
    named, contract = region.arguments, contract_of(region)
    unnamed = [name for i, name in enumerate(operands) if i not in named.values()] if named else []
    if unnamed and contract is None:
        return f"its operand '{unnamed[0]}' is none of the arguments of the pattern ({', '.join(named)})"
    both = sorted(named.keys() & region.attrs.keys())
    if both:
        return f"'{both[0]}' is an argument and an attribute at once"
    if any(k is None for k in region.results):
        inner = region.results.index(None)
        return f"its result {inner} is a value from inside, which a kernel for the whole does not have"
    try:
        signature = inspect.signature(kernel)
    except (TypeError, ValueError):
        return None  # built in, and without a signature; the trial will tell
    foreign = _foreign(kernel, region)
    given, keywords = () if named else tuple(operands), _keywords(kernel, region)
    try:
        signature.bind(*given, **dict.fromkeys(named), **keywords)
    except TypeError as error:
        has = ", ".join(named or operands) or "nothing"
        attrs = f" and the attributes {', '.join(region.attrs)}" if region.attrs else ""
        required = {*named, *keywords} - signature.parameters.keys()
        hint = _near_names(foreign, required)
        return f"the kernel cannot be called with {has}{attrs}: {error}{hint}"
    overlooked = region.attrs.keys() - keywords.keys()
    if overlooked and foreign:
        return (
            f"the kernel's parameter '{foreign[0]}' is none of the kind '{region.kind}' and may stand for an attribute "
            f"that it does not take ({', '.join(sorted(overlooked))}){_near_names(foreign, overlooked)}: use the kind's "
            f"names, take **attributes, or bind it by functools.partial"
        )
    return None


def _library_kinds() -> Mapping[str, Kind]:
    # Imported late: tracing the library's patterns is only paid for by backends with kernels by kind.
    from dovetail.rules.library import KINDS

    return KINDS


def contract_of(region: Region) -> Kind | None:
    """The library's kind that a region is of; None if it has none, or has operands, sizes aside, that it does not name."""
    contract = _library_kinds().get(region.kind)
    if contract is None or not contract.describes(region.version, region.arguments, region.attrs):
        return None
    values = [n.meta.get("val") for n in region.body.graph.nodes if n.op == "placeholder"]
    operands = {i for i, value in enumerate(values) if not isinstance(value, (int, torch.SymInt))}
    return contract if region.results and operands <= set(region.arguments.values()) else None


def near_kind(kernels: Collection[str], kind: str) -> str:
    """A hint for a kind without a kernel: the kinds of a table that are written like it and are no kinds themselves."""
    near = nearest(kind, [name for name in kernels if name not in _library_kinds()], most=1)
    return f"; it has one for '{near[0]}': did you mean '{kind}'?" if near else ""


def _foreign(kernel: Callable[..., Any], region: Region) -> list[str]:
    """The parameters of a kernel, unless bound by `partial`, that are no arguments or attributes of region and kind."""
    contract = _library_kinds().get(region.kind)
    names = {*region.arguments, *region.attrs, *(contract.arguments if contract is not None else ())}
    names.update(kernel.keywords if isinstance(kernel, functools.partial) else ())
    parameters = inspect.signature(kernel).parameters.values()
    return [p.name for p in parameters if p.name not in names and p.kind not in _VARIADIC]


def _near_names(foreign: Iterable[str], required: Collection[str]) -> str:
    """A hint for foreign parameters that are written like a name they leave out."""
    hints: list[str] = []
    for name in foreign:
        abbreviated = [r for r in sorted(required) if name.startswith(r) or r.startswith(name)]
        near = abbreviated or nearest(name, sorted(required), most=1)
        hints += [f"'{name}' may be meant for '{near[0]}'"] if near else []
    return f"; {', '.join(hints)}" if hints else ""


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _keywords(kernel: Callable[..., Any], region: Region) -> Mapping[str, Any]:
    """What a kernel is called with besides its operands.

    That is every attribute, without those it does not take that have the kind's default, and None for each absent
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


def _results(region: Region) -> Sequence[Any]:
    (made,) = region.body.graph.output_node().args
    return cast("Sequence[Any]", made)


def _flat(made: Any) -> Sequence[Any]:
    if isinstance(made, torch.Tensor):
        return (made,)
    if isinstance(made, (tuple, list)):
        return cast("Sequence[Any]", made)
    raise Unfit(f"the kernel returned a {type(made).__name__}, neither a tensor nor a tuple of them")


_NOWHERE = torch.nn.Module()


def why_not_fixed(region: Region) -> str | None:
    """Why code for the sizes seen once would not do: a size that may vary, an operand that is a number."""
    for node in region.body.graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return f"its operand '{node.name}' is a {_word(value)}, not a tensor"
        if any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride())):
            return f"the sizes of its operand '{node.name}' may vary"
    return None


def why_not_plain(region: Region, *allowed: str) -> str | None:
    """Why a region is no plain computation, effects of the words given aside."""
    found = [word for word in region.effects if word not in allowed]
    return f"it has effects ({', '.join(found)}) that must stay where they are" if found else None


def operand_devices(region: Region) -> Iterator[torch.device]:
    """Where the operands of a region lie, as far as that is known."""
    for node in region.body.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            yield value.device


def values_of(*nodes: Node) -> Iterator[Any]:
    """What nodes compute; parts of tuples one by one, without those that are not there."""
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            yield from (one for one in cast("Sequence[Any]", value) if one is not None)
        else:
            yield value


def why_empty(node: Node) -> str | None:
    """Why an operation is on tensors without elements, of which compilers make other numbers than torch, or none.

    Of a tuple some may be empty that nobody reads, as the statistics of a norm in eval mode.
    """
    for one in (node, *node.all_input_nodes):
        value = one.meta.get("val")
        if isinstance(value, Tensor) and any(_may_be_zero(n) for n in value.shape):
            return f"'{one.name}' has no elements, or may have none"
    return None


def why_denormal(node: Node, name: str) -> str | None:
    """Why a literal would be zero to a compiler: it is denormal in the dtype that the operation computes in."""
    dtypes = [v.dtype for v in values_of(node, *node.all_input_nodes) if isinstance(v, Tensor)]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    dtype = (
        functools.reduce(torch.promote_types, floating, floating[0])
        if floating
        else torch.get_default_dtype()
    )
    literals = [v for v in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(v, float)]
    for literal in literals:
        if literal and 0 < float(torch.tensor(literal, dtype=dtype).abs()) < torch.finfo(dtype).tiny:
            return f"{literal} is denormal in {str(dtype).removeprefix('torch.')}, and '{name}' takes that for zero"
    return None


def _may_be_zero(size: Any) -> bool:
    """Whether a size can be zero; those that operands have may not where they vary, for calls are guarded."""
    if is_number(size):
        return size == 0
    node = size.node
    return not node.expr.is_symbol and node.shape_env.bound_sympy(node.expr).lower < 1


def why_not_pure(node: Node) -> str | None:
    """Why a node is no operation of tensors alone."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return f"'{node.name}' calls {target}, which is no operator"
    found = effects(node, _NOWHERE)
    if found.pure:
        return None
    word = "writes" if found.writes else "draws random numbers" if found.random else "acts on the world"
    return f"{target} {word}"


@contextmanager
def quiet() -> Generator[None]:
    """Keep from the user what torch says of its own older parts: that they are deprecated, and how they work."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _word(value: object) -> str:
    return "number" if isinstance(value, (int, float, torch.SymInt)) else type(value).__name__


def load_package(name: str) -> Any:
    """A module of another project, imported when it is needed; what it has is not known here."""
    return import_module(name)


def package_version(package: str) -> str:
    """The version of a package, for cache keys."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not package_version"
