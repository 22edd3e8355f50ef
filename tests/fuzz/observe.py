"""Running a graph and noting everything that can be seen of it from outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from . import ops
from .program import seed


@dataclass
class Seen:
    """One run, in terms that compare: bits of tensors, not their identity."""

    error: str = ""
    structure: str = ""
    outputs: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    random: bytes = b""
    log: list[tuple[object, ...]] = field(default_factory=list)
    grad_mode: bool = True
    aliasing: list[Any] = field(default_factory=list)
    gradients: Any = None


class Snapshot:
    """The numbers a module owns, to be put back before each run."""

    def __init__(self, root: nn.Module) -> None:
        self._holders: dict[str, tuple[dict[str, Any], str]] = {}
        seen: set[int] = set()
        for path, module in root.named_modules():
            for holder in (module._parameters, module._buffers, module.__dict__):
                for name, tensor in holder.items():
                    if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                        seen.add(id(tensor))
                        self._holders[f"{path}.{name}" if path else name] = (holder, name)
        self._saved = [
            (*self._holders[name], t, t.detach().clone(), t.size(), t.stride(), t.storage_offset())
            for name, t in self.tensors.items()
        ]
        self._generators = [
            (value, value.get_state())
            for module in root.modules()
            for value in vars(module).values()
            if isinstance(value, torch.Generator)
        ]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What the module owns now, by name: a run may put another tensor in the place of one."""
        return {path: holder[name] for path, (holder, name) in self._holders.items()}

    def restore(self) -> None:
        for generator, state in self._generators:
            generator.set_state(state)
        with torch.no_grad():
            for holder, name, tensor, saved, size, stride, offset in self._saved:
                holder[name] = tensor
                if not tensor.is_leaf:
                    tensor.detach_()  # a write of something with a gradient gave it a history
                if tensor.size() != size or tensor.stride() != stride:
                    tensor.as_strided_(size, stride, offset)
                tensor.copy_(saved)


def observe(
    gm: Callable[..., Any], state: Snapshot, inputs: Sequence[Any], *, runs: int = 1, gradients: bool = False
) -> list[Seen]:
    """Run from the saved state with a fixed seed, several times in a row; state is left restored."""
    state.restore()
    seed(3)
    seen: list[Seen] = []
    try:
        for _ in range(runs):
            seen.append(_run(gm, state, inputs, gradients))
            if seen[-1].error:
                break
    finally:
        state.restore()
    return seen


def _run(gm: Callable[..., Any], state: Snapshot, inputs: Sequence[Any], gradients: bool) -> Seen:
    ops.LOG.clear()
    given = [_fresh(x) for x in inputs]
    try:
        result = gm(*given)
    except Exception as error:
        return Seen(error=f"{type(error).__name__}: {error}")
    finally:
        grad_mode = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
    leaves, spec = pytree.tree_flatten(result)
    everything = [*leaves, *given, *state.tensors.values()]
    return Seen(
        structure=str(spec),
        outputs=[_note(x) for x in leaves],
        inputs=[_note(x) for x in given],
        state={name: _note(t) for name, t in state.tensors.items()},
        random=torch.get_rng_state().numpy().tobytes(),
        log=list(ops.LOG),
        grad_mode=grad_mode,
        aliasing=_aliasing(everything),
        gradients=_gradients(leaves, [*given, *state.tensors.values()]) if gradients else None,
    )


def _fresh(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # Strides and shared elements are part of an input.
    fresh = torch.empty(0, dtype=value.dtype)
    fresh.set_(value.untyped_storage().clone(), value.storage_offset(), value.shape, value.stride())
    return fresh.requires_grad_(value.requires_grad)


def _note(value: Any) -> Any:
    """A tensor as bytes with everything else that shows; anything else as it is written."""
    if isinstance(value, torch.Generator):
        return "a generator", value.get_state().numpy().tobytes()
    if not isinstance(value, torch.Tensor):
        return repr(value)
    dense = value.detach().contiguous()
    return (
        value.dtype,
        tuple(value.shape),
        value.stride(),
        value.requires_grad,
        isinstance(value, nn.Parameter),
        dense.numpy().tobytes(),
    )


def _aliasing(values: Sequence[Any]) -> list[Any]:
    """Which of the values are one object or share memory, numbered by first appearance."""
    storages: dict[int, int] = {}
    objects: dict[int, int] = {}
    groups: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata
            storage = storages.setdefault(key, len(storages))
            groups.append((storage, objects.setdefault(id(value), len(objects)), value.storage_offset()))
    return groups


def _gradients(leaves: Sequence[Any], sources: Sequence[Any]) -> Any:
    """Gradients of the sum of all outputs, or why there are none."""
    results = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
    roots = [x for x in sources if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf]
    if not results or not roots:
        return "nothing to differentiate"
    try:
        total = sum((x.sum() for x in results), start=torch.zeros(()))
        return [
            None if g is None else g.detach().clone()
            for g in torch.autograd.grad(total, roots, allow_unused=True)
        ]
    except RuntimeError as error:
        return f"no gradient: {type(error).__name__}"


SEEN = ("error", "structure", "outputs", "inputs", "state", "random", "log", "grad_mode")


def difference(
    want: Sequence[Seen], got: Sequence[Seen], *, gradients: bool = False, aliasing: bool = True
) -> tuple[str, str]:
    """The first thing that two observations do not share, as the name of a property and words; empty if none."""
    names = (*SEEN, "aliasing") if aliasing else SEEN
    for run, (a, b) in enumerate(zip(want, got, strict=True)):
        for name in names:
            one, other = getattr(a, name), getattr(b, name)
            if one != other:
                return name, f"run {run}: {_first(one, other)}"
        if gradients and not _close(a.gradients, b.gradients):
            return "gradients", f"run {run}: {a.gradients} became {b.gradients}"
    return "", ""


def loose_difference(
    want: Sequence[Seen],
    got: Sequence[Seen],
    *,
    gradients: bool = False,
    aliasing: bool = False,
    rtol: float = 1e-3,
    atol: float = 1e-4,
) -> tuple[str, str]:
    """The same where numbers may be rounded otherwise: floating ones need only be close."""

    def taken(a: Any, b: Any) -> Any:
        return _taken(a, b, rtol, atol)

    for a, b in zip(want, got, strict=True):
        for name in ("outputs", "inputs"):
            setattr(b, name, [taken(x, y) for x, y in zip(getattr(a, name), getattr(b, name), strict=False)])
        b.state = {k: taken(a.state[k], v) if k in a.state else v for k, v in b.state.items()}
    return difference(want, got, gradients=gradients, aliasing=aliasing)


def _taken(want: Any, got: Any, rtol: float, atol: float) -> Any:
    """What is wanted, if what was got is close to it."""
    if not isinstance(want, tuple) or not isinstance(got, tuple) or want[:-1] != got[:-1]:
        return got
    if not want[0].is_floating_point or not want[-1]:
        return got
    a, b = (torch.frombuffer(bytearray(note[-1]), dtype=want[0]) for note in (want, got))
    return want if torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True) else got


def _first(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(f"{k}: {_first(v, other[k])}" for k, v in one.items() if v != other[k])
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next(
            f"[{i}] {_first(a, b)}" for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b
        )
    return f"{_shown(one)} became {_shown(other)}"


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes {hash(value) & 0xFFFF:04x}>"
    if isinstance(value, tuple) and value and isinstance(value[-1], bytes):
        dtype, shape, *rest, data = value
        numbers = torch.frombuffer(bytearray(data), dtype=dtype).tolist() if data else []
        return f"{numbers} {dtype} {shape} {rest}"
    return repr(value)


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, str) and a.startswith("no gradient"):
        return True  # the original cannot be differentiated either
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)
    return type(a) is type(b) and (a == b or not isinstance(a, str))
