"""Recording of the calls of modules within a model, in one run that leaves the model as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.frontend.check_capture import preserve_module_state
from dovetail.ir.nodes import storage_key
from dovetail.lowering.guards import trial_run


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """Arguments of a call; tensors are not copied."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def call(self, model: Callable[..., Any]) -> Any:
        return model(*self.args, **self.kwargs)

    def copied(self) -> ModelInputs:
        """Return the inputs with their tensors copied."""
        return ModelInputs(*copy_tensors((self.args, dict(self.kwargs))))

    def map(self, function: Callable[[Any], Any]) -> ModelInputs:
        """Return the inputs with a function applied to each leaf."""
        return ModelInputs(*pytree.tree_map(function, (self.args, dict(self.kwargs))))


def example_inputs(args: Any, kwargs: Any) -> ModelInputs | None:
    """Return example inputs as users pass them; None without any."""
    if args is None and kwargs is None:
        return None
    if args is not None and not isinstance(args, (tuple, list)):
        raise InvalidArgument(f"args must be a tuple of example inputs, not a {type(args).__name__}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidArgument(f"kwargs must be a dict of example inputs, not a {type(kwargs).__name__}.")
    return ModelInputs(tuple(args or ()), dict(kwargs or {}))


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call of a part: copies of its inputs and of its result."""

    example: ModelInputs
    result: Any = field(repr=False)


def call_signature(example: ModelInputs) -> Any:
    """Return the key of calls that one trace covers."""
    leaves, spec = pytree.tree_flatten((example.args, dict(example.kwargs)))
    return str(spec), tuple(_leaf_signature(leaf) for leaf in leaves)


def _leaf_signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (
            tuple(leaf.shape),
            tuple(leaf.stride()) if leaf.layout is torch.strided else (),
            leaf.dtype,
            leaf.device,
        )
    return (type(leaf).__name__, repr(leaf))


def copy_tensors(value: Any) -> Any:
    """Return the same structure with its tensors copied.

    Tensors that share memory share it in the copies too: a write to one is visible in the other.
    """
    strided = {id(leaf): leaf for leaf in pytree.tree_leaves(value) if _has_storage(leaf)}
    holders = Counter(storage_key(leaf) for leaf in strided.values())
    storages: dict[int, Any] = {}
    copies: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            place = storage_key(leaf) if id(leaf) in strided else None
            if place is None:
                new = leaf.detach().clone()
            elif holders[place] == 1:
                new = _strided_copy(leaf.detach())
            else:
                storage = storages.setdefault(place, leaf.untyped_storage().clone())
                new = (
                    leaf.detach().new_empty(0).set_(storage, leaf.storage_offset(), leaf.shape, leaf.stride())
                )  # pyright: ignore[reportArgumentType, reportCallIssue]
            copies[id(leaf)] = new.requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return pytree.tree_map(copy, value)


def _strided_copy(value: Tensor) -> Tensor:
    """Return a copy with the same strides, of the elements between the first and the last one only."""
    if value.numel() == 0 or value.is_contiguous():
        return value.clone()
    extent = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
    elements = value.as_strided((extent,), (1,)).clone()
    return elements.as_strided(value.shape, value.stride(), 0)


def _has_storage(leaf: Any) -> bool:
    return type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided


def expand_objects(value: Any, around: tuple[Any, ...] = ()) -> Any:
    """Return a result with dataclasses, and other objects that hold tensors, as dicts of their fields.

    `around` are the objects that the value is in; one of them within itself stays as it is.
    """

    def expand(leaf: Any) -> Any:
        if isinstance(leaf, (Tensor, nn.Module, type)) or any(leaf is outer for outer in around):
            return leaf
        if is_dataclass(leaf):
            inner = {each.name: getattr(leaf, each.name, None) for each in fields(leaf)}
        else:
            inner = dict(getattr(leaf, "__dict__", {}))
            if not any(isinstance(held, Tensor) for held in pytree.tree_leaves(inner)):
                return leaf
        inside = (*around, leaf)
        return {f"{type(leaf).__name__}.{name}": expand_objects(held, inside) for name, held in inner.items()}

    return pytree.tree_map(expand, value)


def record_calls(
    model: nn.Module, paths: Iterable[str], example: ModelInputs
) -> dict[str, list[RecordedCall]]:
    """Return the calls of some parts in one run of the model, one for each signature, in order.

    State, gradients and random generators are restored afterwards.
    """
    modules = {path: model.get_submodule(path) for path in paths}
    calls: dict[str, list[RecordedCall]] = {path: [] for path in modules}
    with ExitStack() as stack:
        for path, module in modules.items():
            stack.enter_context(_record_forward(module, calls[path]))
        with isolated_run(model), torch.no_grad():
            inputs = example.copied()
            try:
                inputs.call(model)
            except Exception as error:
                raise ScheduleError(
                    f"the model does not run on the example inputs: {type(error).__name__}: {error}"
                ) from error
    for path, recorded in calls.items():
        if not recorded:
            raise ScheduleError(
                f"part '{path}' was not called when the model ran on the example inputs. "
                f"Give inputs that reach it, or take another part."
            )
    return calls


def record_results(model: nn.Module, path: str, example: ModelInputs) -> list[Any]:
    """Return what each call of a module within a model returned, in one run of the model's forward."""
    returned: list[Any] = []

    def note(*call: Any) -> None:
        returned.append(copy_tensors(call[-1]))

    with isolated_run(model), torch.no_grad():
        inputs = example.copied()
        handle = model.get_submodule(path).register_forward_hook(note)
        try:
            result = inputs.call(model.forward)
        finally:
            handle.remove()
    return returned if path else [copy_tensors(result)]


@contextmanager
def _record_forward(module: nn.Module, calls: list[RecordedCall]) -> Generator[None]:
    """Append the calls of a module to a list.

    Its forward is wrapped rather than hooked: pre-hooks of its own run around what is traced, not in it.
    """
    signatures: set[Any] = set()
    own = module.__dict__.get("forward")
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        example = ModelInputs(args, kwargs)
        # A part around it that is captured in this run calls it with values that have no data.
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return inner(*args, **kwargs)
        signature = call_signature(example)
        is_new = signature not in signatures
        if is_new:
            signatures.add(signature)
            example = example.copied()
        result = inner(*args, **kwargs)
        if is_new:
            calls.append(RecordedCall(example, copy_tensors(result)))
        return result

    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = own


@contextmanager
def isolated_run(model: nn.Module) -> Generator[None]:
    """Restore what runs of a model change: parameters, buffers, gradients, attributes, random state."""
    with preserve_module_state(model), trial_run():
        yield


@contextmanager
def training_mode(module: nn.Module, train: bool | None) -> Generator[None]:
    """Run a module in train or eval mode, or with None in its own, and restore the modes of its submodules."""
    modes = [(each, each.training) for each in module.modules()]
    if train is not None:
        module.train(train)
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode
