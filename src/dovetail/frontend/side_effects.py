"""Side effects of a model's forward, detected while it is traced and undone afterwards.

`watched` compares attributes, arguments and buffers before and after forward, runs it under `TensorEffects`, and patches
the few functions of Python and torch whose effect tracing would drop silently. New tensors that forward assigns to
buffers become writes into the old ones (`BufferAssignments`); caches among the arguments that it updates become results.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
import types
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.checkpoint import CheckpointFunction

from dovetail import torch_compat
from dovetail.errors import CaptureError
from dovetail.frontend import calling_convention
from dovetail.frontend.export_aliases import storage_of
from dovetail.frontend.tensor_effects import TensorEffects, autograd_history
from dovetail.ir import source_location

Note = Callable[[str, str], None]


class BufferAssignments:
    """The buffers of a model when its forward begins, so that tensors assigned to them can be written into the old ones."""

    def __init__(self, model: nn.Module) -> None:
        self._own = model._buffers
        self._before = [
            (path, module._buffers, name, buffer)
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
        ]

    def settle(self, result: Any, note: Note) -> Any:
        """Write the tensors assigned to buffers into the old ones, and return the result of forward.

        A result that is a buffer's old value becomes a copy, because the write would change it.
        """
        changed = [
            (f"{path}.{name}" if path else name, holder, name, old, holder.get(name))
            for path, holder, name, old in self._before
            if holder.get(name) is not old
        ]
        inner: list[tuple[Tensor, Tensor]] = []
        for label, holder, name, old, new in changed:
            if old is None or new is None or new.shape != old.shape or new.dtype != old.dtype:
                note(
                    f"forward assigns buffer '{label}' a tensor of another shape or dtype, which a graph cannot do",
                    "Keep its shape and dtype, or pass the value in and return it.",
                )
            elif self._is_tied(old, holder, name):
                note(
                    f"forward assigns buffer '{label}' a new tensor, and other buffers that are the same tensor keep the old one",
                    "Register a buffer of its own for each.",
                )
            elif holder is not self._own:
                inner.append((old, new))
                holder[name] = old
        if not inner:
            return result
        storages = {storage_of(old) for old, _ in inner}

        def cloned(value: Any) -> Any:
            is_old = isinstance(value, Tensor) and storage_of(value) in storages
            return value.clone() if is_old else value

        result = pytree.tree_map(cloned, result)
        values = [cloned(new) for _, new in inner]
        for (old, _), value in zip(inner, values, strict=True):
            old.copy_(value)
        return result

    def _is_tied(self, old: Tensor, holder: dict[str, Any], name: str) -> bool:
        here = [(h, n) for _, h, n, buffer in self._before if buffer is old]
        return any(h.get(n) is not holder[name] for h, n in here)


_MODULE_STATE = (
    "_forward_hooks _forward_pre_hooks _parameters _buffers _modules _non_persistent_buffers_set training"
)
_OWN = frozenset(_MODULE_STATE.split())
_CONTAINERS = (list, dict, set)
_WEIGHT_LISTS = frozenset({"_flat_weights", "_flat_weight_refs"})

# Set by transformers together with hooks that record outputs, in the first call that returns hidden states or attentions.
_HOOKS_INSTALLED = "_output_capturing_hooks_installed"
_MISSING = object()

# Autograd functions of torch itself that tracing keeps, or that only save memory.
_HARMLESS = (
    "torch._higher_order_ops",
    "torch._functorch",
    "torch._dynamo",
    "torch._library",
    "torch.utils.checkpoint",
)
_PRINT = torch_compat.TorchName("builtins.print", "notices prints, which tracing drops", "they are dropped")


@dataclass
class SideEffects:
    """What was detected while tracing: `findings` describe the effects that a graph cannot hold, in order.

    `caches` are the arguments, by name or position, that are caches which forward updated or returned, each with the
    position of its state among the caches in the results; `appended` of these are returned only for this. `data_line` is
    where forward last read `.data`, which the exporter supports in few cases and reports without a line; `stride_reads`
    are the methods it called whose results depend on strides; `function` is the first autograd.Function it applied to
    values that had no gradients then, and might have some in another call.
    """

    findings: list[str] = field(default_factory=list[str])
    caches: tuple[tuple[str | int, int], ...] = ()
    appended: int = 0
    data_line: source_location.SourceLine | None = None
    stride_reads: frozenset[str] = frozenset()
    function: str = ""

    def note(self, what: str, line: source_location.SourceLine | None, advice: str) -> None:
        self.findings.append(source_location.located(what, line, advice))

    def refuse(self) -> None:
        """Raise CaptureError for the first finding, if any."""
        if self.findings:
            raise CaptureError(self.findings[0])


@contextlib.contextmanager
def watched(model: nn.Module, *, trains: bool = True) -> Generator[SideEffects]:
    """Detect effects that a graph cannot hold, and restore every attribute of the model at the end.

    Unless the graph `trains`, functions with a backward formula of their own do not count.

    Only what Python itself runs on the calling thread is detected: a bytecode tracer such as Dynamo runs nothing here.
    """
    seen = SideEffects()
    before = snapshot(model)
    arguments: list[_Arguments] = []
    effects = TensorEffects(seen.note)
    entered: list[TensorEffects] = []
    buffers: list[BufferAssignments] = []

    def at_start(module: nn.Module, args: Any, kwargs: Any) -> None:
        arguments[:] = [_Arguments(args, kwargs)]
        buffers[:] = [BufferAssignments(module)]
        effects.begin(module, pytree.tree_leaves((args, kwargs)))
        entered.append(effects.__enter__())

    def at_end(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        entered.pop().__exit__(None, None, None)
        effects.end(result)
        effects.restore()
        if not notices_functions:
            _note_functions(result, seen, trains)
        _compare(before, seen)
        if arguments:
            result = arguments.pop().compare(args, kwargs, result, seen)
        return buffers.pop().settle(result, lambda what, advice: seen.note(what, None, advice))

    # Compared as soon as forward returns, because the exporter silently restores attributes itself.
    hooks = [
        model.register_forward_pre_hook(at_start, with_kwargs=True, prepend=True),
        model.register_forward_hook(at_end, with_kwargs=True, always_call=True),
    ]
    with _intercepted(seen, effects, trains) as notices_functions:
        try:
            yield seen
        finally:
            # No hook runs after a forward that raised, so that its mode is still active.
            for mode in entered:
                mode.__exit__(None, None, None)
            effects.restore()
            seen.data_line, seen.stride_reads = effects.data_line, frozenset(effects.stride_reads)
            for hook in hooks:
                hook.remove()
            restore(before)


class _Arguments:
    """The arguments of forward as they were when it began."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._leaves, self._spec = pytree.tree_flatten((args, kwargs), is_leaf=calling_convention.is_cache)
        self._caches = [
            (where, value, pytree.tree_flatten(value))
            for where, value in [*enumerate(args), *kwargs.items()]
            if calling_convention.is_cache(value)
        ]
        self._nested = [
            (leaf, pytree.tree_flatten(leaf))
            for leaf in self._leaves
            if calling_convention.is_cache(leaf) and not any(leaf is cache for _, cache, _ in self._caches)
        ]

    def compare(self, args: Any, kwargs: Any, result: Any, seen: SideEffects) -> Any:
        """Note lists, dicts and other objects that forward changed, and return its result.

        Caches that it updated are part of the result; those that it does not return are appended in a tuple.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=calling_convention.is_cache)
        if not _are_same((leaves, spec), (self._leaves, self._spec)) or not all(
            _are_same(pytree.tree_flatten(cache), before) for cache, before in self._nested
        ):
            seen.note(
                "forward changes a list, dict or other object among its arguments, which a graph cannot do",
                None,
                "Return the new values instead.",
            )
            return result
        returned = [
            v
            for v in pytree.tree_leaves(result, is_leaf=calling_convention.is_cache)
            if calling_convention.is_cache(v)
        ]
        positions: list[tuple[str | int, int]] = []
        appended: list[Any] = []
        for where, cache, before in self._caches:
            at = [i for i, value in enumerate(returned) if value is cache]
            positions += [(where, i) for i in at]
            if not at and not _are_same(pytree.tree_flatten(cache), before):
                positions.append((where, len(returned) + len(appended)))
                appended.append(cache)
        seen.caches, seen.appended = tuple(positions), len(appended)
        return (result, *appended) if appended else result


def _are_same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> bool:
    leaves, others = one[0], other[0]
    return (
        len(leaves) == len(others)
        and all(a is b or (type(a) is int and a == b) for a, b in zip(leaves, others, strict=True))
        and one[1] == other[1]
    )


Snapshot = list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]]


def snapshot(model: nn.Module) -> Snapshot:
    """Return the attributes of a model's modules other than parameters, buffers and modules, and copies of containers.

    Lists, dicts and sets can change without being assigned.
    """
    saved: Snapshot = []
    for path, module in model.named_modules():
        attributes = {k: v for k, v in module.__dict__.items() if k not in _OWN}
        contents: dict[str, Any] = {k: v.copy() for k, v in attributes.items() if type(v) in _CONTAINERS}
        saved.append((path, module, attributes, contents))
    return saved


def _compare(before: Snapshot, seen: SideEffects) -> None:
    for path, module, attributes, contents in before:
        if type(module).__module__.startswith("torch."):
            continue  # torch's own layers keep lists of their weights, which the exporter swaps
        now = module.__dict__
        for name in _added(module, attributes):
            _note_attribute(seen, path, module, name, now[name])
        for name, old in attributes.items():
            if name in _WEIGHT_LISTS:
                continue
            new = now.get(name, _MISSING)
            if new is not old and not _same(old, new):
                _note_attribute(seen, path, module, name, new)
            elif name in contents and not _same_items(old, contents[name]):
                _note_attribute(seen, path, module, name, old)


def _added(module: nn.Module, attributes: dict[str, Any]) -> list[str]:
    """Return the attributes of a module that were added since `attributes` were saved."""
    known = {*_OWN, _HOOKS_INSTALLED, *attributes}
    return [name for name in module.__dict__ if name not in known]


def restore(before: Snapshot) -> None:
    """Restore every attribute."""
    for _, module, attributes, contents in before:
        now = module.__dict__
        for name in _added(module, attributes):
            del now[name]
        now.update(attributes)
        for name, copy in contents.items():
            if not _same_items(attributes[name], copy):
                _refill(attributes[name], copy)


def _same(old: object, new: object) -> bool:
    if isinstance(old, Tensor) or isinstance(new, Tensor) or type(old) is not type(new):
        return False
    try:
        return bool(old == new)
    except (RuntimeError, TypeError, ValueError):
        return False


def _same_items(old: Any, copy: Any) -> bool:
    if len(old) != len(copy):
        return False
    if isinstance(old, set):
        return old == copy
    items = cast(Any, old.items() if isinstance(old, dict) else enumerate(old))
    others = cast(Any, copy.items() if isinstance(copy, dict) else enumerate(copy))
    return all(k1 == k2 and a is b for (k1, a), (k2, b) in zip(items, others, strict=True))


def _refill(container: Any, copy: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(copy)
    else:
        container.update(copy)


def _note_attribute(seen: SideEffects, path: str, module: nn.Module, name: str, value: object) -> None:
    shown = f"self.{name}" + (f" of '{path}'" if path else "") + f" ({type(module).__name__})"
    advice = f"Make it a buffer (self.register_buffer({name!r}, torch.tensor(...))), return it, or drop it."
    if isinstance(value, Tensor):
        advice = f"Register it in __init__: self.register_buffer({name!r}, ...); buffer updates are captured."
    seen.note(
        f"forward sets {shown}, a Python side effect that a graph cannot hold",
        source_location.of_attribute(module, name),
        f"{advice} If later calls leave it as it is, call the model once before it is captured.",
    )


@contextlib.contextmanager
def _intercepted(seen: SideEffects, effects: TensorEffects, trains: bool) -> Generator[bool]:
    """Patch the few calls whose effect tracing would drop silently; yields whether autograd functions are detected."""
    here = threading.get_ident()
    dispatches = _dispatch_codes()

    def from_forward() -> bool:
        return threading.get_ident() == here and not _within_operator(dispatches)

    def printing(original: Any) -> Any:
        def show(*args: Any, **kwargs: Any) -> None:
            file = sys._getframe(1).f_code.co_filename
            if not source_location.is_user_file(file) or not from_forward():
                original(*args, **kwargs)
                return
            advice = "Print outside the model, or drop it."
            seen.note("forward prints, which a graph cannot do", source_location.of_caller(), advice)

        return show

    def before(
        note: Callable[[], None], applies: Callable[..., bool] = lambda *_: True
    ) -> Callable[[Any], Any]:
        """Return what replaces a function by one that calls `note` first if forward calls it."""

        def replace(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if applies(*args) and from_forward():
                    note()
                return original(*args, **kwargs)

            return call

        return replace

    def note_inference_mode() -> None:
        seen.note(
            "forward enters torch.inference_mode(), which tracing drops, so gradients would differ",
            source_location.of_caller(),
            "Use torch.no_grad() inside the model.",
        )

    def note_hook() -> None:
        seen.note(
            "forward registers a hook on a gradient, which a graph cannot hold",
            source_location.of_caller(),
            "Change the gradient with a custom operator (torch.library.custom_op with register_autograd).",
        )

    def note_seeding() -> None:
        effects.note_seeding(source_location.of_caller())

    seeding = before(note_seeding, lambda *_: effects.is_running)

    def applying(original: Any) -> Any:
        if not hasattr(type(original), "__get__"):
            raise TypeError("not a method")

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_traced_through(cls) and torch.is_grad_enabled() and from_forward():
                _note_function(cls, (*args, *kwargs.values()), seen, trains)
            return torch_compat.bound(original, cls)(*args, **kwargs)

        return classmethod(apply)

    with torch_compat.patched(
        [
            (_PRINT, printing),
            (torch_compat.INFERENCE_MODE, before(note_inference_mode, operator.attrgetter("mode"))),
            *((name, before(note_hook)) for name in torch_compat.GRADIENT_HOOKS),
            *((name, seeding) for name in torch_compat.SEEDING),
            (torch_compat.FUNCTION_APPLY, applying),
        ]
    ) as replaced:
        yield torch_compat.FUNCTION_APPLY in replaced


def _note_function(cls: Any, args: tuple[Any, ...], seen: SideEffects, trains: bool) -> None:
    tensors = [a for a in args if isinstance(a, Tensor)]
    if trains and any(a.requires_grad for a in tensors):
        _note_dropped_formula(cls, source_location.of_caller(), seen)
    elif any(a.is_floating_point() or a.is_complex() for a in tensors):
        seen.function = seen.function or cls.__name__


def _is_traced_through(cls: Any) -> bool:
    """Return whether a function of torch itself has no backward formula that tracing drops."""
    # A reentrant checkpoint runs its forward without gradients and records them in backward.
    return cls is not CheckpointFunction and cls.__module__.startswith(_HARMLESS)


def _note_dropped_formula(cls: Any, line: source_location.SourceLine | None, seen: SideEffects) -> None:
    if cls is CheckpointFunction:
        seen.note(
            "forward uses a reentrant checkpoint, whose gradients tracing drops",
            line,
            "Give use_reentrant=False to torch.utils.checkpoint.checkpoint.",
        )
        return
    seen.note(
        f"forward applies {cls.__name__}, whose own backward formula tracing drops",
        line,
        "For inference capture in torch.no_grad(), or with requires_grad_(False). For training make it a custom operator "
        "(torch.library.custom_op with register_autograd), which keeps its derivative.",
    )


def _note_functions(results: Any, seen: SideEffects, trains: bool) -> None:
    """Note functions with a backward formula of their own in the autograd history of results."""
    for node in autograd_history(pytree.tree_leaves(results)):
        cls = getattr(node, "_forward_cls", None)
        if cls is not None and not _is_traced_through(cls):
            if trains:
                _note_dropped_formula(cls, None, seen)
            seen.function = seen.function or cls.__name__


def _dispatch_codes() -> frozenset[types.CodeType]:
    """Return the code of torch that dispatches operators; empty if it is not Python."""
    codes: set[types.CodeType] = set()
    for name in torch_compat.DISPATCH:
        code = getattr(name.value, "__code__", None)
        if code is None:
            name.report()
        else:
            codes.add(code)
    return frozenset(codes)


def _within_operator(dispatches: frozenset[types.CodeType]) -> bool:
    """Return whether an operator of torch.library is being dispatched on this thread.

    Tracing keeps those whole, so that their kernels and derivatives run wherever the graph calls them.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in dispatches and isinstance(
            frame.f_locals.get("self"), (OpOverload, OpOverloadPacket)
        ):
            return True
        frame = frame.f_back
    return False
