"""How parts of a model are called: their inputs in one run of it, which leaves no trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from dovetail.errors import ScheduleError
from dovetail.frontend.check_capture import state_kept
from dovetail.lowering.guards import trial_run


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """What a model is called with; tensors are the caller's own."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def call(self, model: Callable[..., Any]) -> Any:
        return model(*self.args, **self.kwargs)

    def copied(self) -> ModelInputs:
        """The same inputs, of which nothing that runs later can change any."""
        return ModelInputs(*copied((self.args, dict(self.kwargs))))


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call of a part: copies of what it was given, and what it returned."""

    example: ModelInputs
    result: Any = field(repr=False)

    @property
    def signature(self) -> Any:
        """What tells calls apart that need a trace each."""
        return signature_of(self.example)


def signature_of(example: ModelInputs) -> Any:
    leaves, spec = pytree.tree_flatten((example.args, dict(example.kwargs)))
    return str(spec), tuple(_told(leaf) for leaf in leaves)


def _told(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (
            tuple(leaf.shape),
            tuple(leaf.stride()) if leaf.layout is torch.strided else (),
            leaf.dtype,
            leaf.device,
        )
    return (type(leaf).__name__, repr(leaf))


def copied(value: Any) -> Any:
    """The same structure with copies of its tensors, which nothing that runs later can change.

    Those that share memory share it in the copies too: a write to one is seen in the other.
    """
    plain = {id(leaf): leaf for leaf in pytree.tree_leaves(value) if _has_storage(leaf)}
    holders = Counter(leaf.untyped_storage()._cdata for leaf in plain.values())
    storages: dict[int, Any] = {}
    made: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in made:
            place = leaf.untyped_storage()._cdata if id(leaf) in plain else None
            if place is None or holders[place] == 1:
                new = leaf.detach().clone()
            else:
                storage = storages.setdefault(place, leaf.untyped_storage().clone())
                new = (
                    leaf.detach().new_empty(0).set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())
                )  # pyright: ignore[reportArgumentType, reportCallIssue]
            made[id(leaf)] = new.requires_grad_(leaf.requires_grad)
        return made[id(leaf)]

    return pytree.tree_map(copy, value)


def _has_storage(leaf: Any) -> bool:
    return type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided


def opened(value: Any) -> Any:
    """The same with dataclasses, and other objects that hold tensors, as dicts of what is in them."""
    return _within(value, ())


def _within(value: Any, around: tuple[Any, ...]) -> Any:
    def opened(leaf: Any) -> Any:
        return _opened(leaf, around)

    return pytree.tree_map(opened, value)


def _opened(value: Any, around: tuple[Any, ...]) -> Any:
    if isinstance(value, (Tensor, nn.Module, type)) or any(value is outer for outer in around):
        return value
    if is_dataclass(value):
        inner = {each.name: getattr(value, each.name, None) for each in fields(value)}
    else:
        inner = dict(getattr(value, "__dict__", {}))
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(inner)):
            return value
    inside = (*around, value)
    return {f"{type(value).__name__}.{name}": _within(held, inside) for name, held in inner.items()}


def record(model: nn.Module, paths: Iterable[str], example: ModelInputs) -> dict[str, list[RecordedCall]]:
    """The calls of some parts in one run of the model, one for each signature, in the order they came.

    State, gradients and random streams are as they were afterwards.
    """
    wanted = {path: model.get_submodule(path) for path in paths}
    calls: dict[str, list[RecordedCall]] = {path: [] for path in wanted}
    with ExitStack() as stack:
        for path, module in wanted.items():
            stack.callback(_watch(module, calls[path]).remove)
        with undisturbed(model), torch.no_grad():
            mine = example.copied()
            try:
                mine.call(model)
            except Exception as error:
                raise ScheduleError(
                    f"the model does not run on the example inputs: {type(error).__name__}: {error}"
                ) from error
    for path, found in calls.items():
        if not found:
            raise ScheduleError(
                f"part '{path}' was not called when the model ran on the example inputs. "
                f"Give inputs that reach it, or take another part."
            )
    return calls


def returned_by(model: nn.Module, path: str, example: ModelInputs) -> list[Any]:
    """What each call of a module within a model returned, in one run of the model's forward."""
    returned: list[Any] = []

    def note(*call: Any) -> None:
        returned.append(copied(call[-1]))

    with undisturbed(model), torch.no_grad():
        given = example.copied()
        handle = model.get_submodule(path).register_forward_hook(note)
        try:
            result = given.call(model.forward)
        finally:
            handle.remove()
    return returned if path else [copied(result)]


def _watch(module: nn.Module, calls: list[RecordedCall]) -> Any:
    """Note the calls of a module.

    Its forward is wrapped rather than hooked: pre-hooks of its own run around what is traced, not in it.
    """
    seen: set[Any] = set()
    own = module.__dict__.get("forward")
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        example = ModelInputs(args, kwargs)
        signature = signature_of(example)
        is_new = signature not in seen
        if is_new:
            seen.add(signature)
            example = example.copied()
        result = inner(*args, **kwargs)
        if is_new:
            calls.append(RecordedCall(example, copied(result)))
        return result

    module.__dict__["forward"] = forward
    return _Restoring(module, own)


@dataclass(frozen=True, eq=False)
class _Restoring:
    module: nn.Module
    own: Any

    def remove(self) -> None:
        if self.own is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self.own


@contextmanager
def undisturbed(model: nn.Module) -> Generator[None]:
    """Run a model and put back what that changes: parameters, buffers, gradients, attributes, random state."""
    with state_kept(model), trial_run():
        yield
