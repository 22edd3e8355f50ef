"""The weights of a graph as they are at each call: the tensors, what they are like, and whether they were written.

`WeightFetch` looks tensors up again only if a dict on their path was written, and returns the same tuple as long as
nothing about them has changed: a guard on the weights of one tuple holds for every call that gets that tuple. Dicts
are compared by their versions (`DictSnapshot`), dtypes, sizes, strides and flags by torch's own guards (`TensorGuard`),
and writes by addresses and version counters (`mutation_stamp`).
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.optim.optimizer import register_optimizer_step_post_hook

from dovetail import torch_compat

_VERSION = operator.attrgetter("_version")
_ADDRESS = Tensor.data_ptr
_fused_steps = [0]


def fused_optimizer_steps() -> int:
    """Return how many optimizer steps ran fused kernels, which raise no version counter, since the first call."""
    _watch_optimizers()
    return _fused_steps[0]


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(group.get("fused") for group in optimizer.param_groups):
        _fused_steps[0] += 1


def mutation_stamp(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the addresses and version counters of tensors, which differ after every write that is counted."""
    try:
        versions = list(map(_VERSION, tensors))
    except RuntimeError:  # inference tensors have no version counter
        versions = [0 if t.is_inference() else t._version for t in tensors]
    return fused_optimizer_steps(), versions, list(map(_ADDRESS, tensors))


FETCH_METHOD = "_fetch_weights"


def find_dict_version() -> Callable[[Any], int] | None:
    """Return torch's function for the version of a dict; None where Python does not change it on a write."""
    version = torch_compat.DICT_VERSION.value
    if version is None:
        return None
    probe = nn.Module()
    before = version(probe.__dict__)
    probe.training = False
    return version if version(probe.__dict__) != before else None


dict_version = find_dict_version()
"""The version of a dict, which changes with every write; None where Python has none."""


class DictSnapshot:
    """The versions of some dicts, to notice cheaply that one was written; never current where dicts have none.

    From the third check on torch compares them in C++, at a quarter of the cost; the guards for that take longer to
    build than a few checks in Python.
    """

    __slots__ = ("_checks", "_guard", "_versions", "dicts")

    def __init__(self, dicts: Sequence[Any]) -> None:
        self.dicts = dicts
        self._versions = None if dict_version is None else list(map(dict_version, dicts))
        self._checks = 0
        self._guard: Callable[[], bool] | None = None

    def is_current(self) -> bool:
        """Return whether no dict was written since."""
        if self._guard is not None:
            return self._guard()
        # Before the comparison: guards that were built after a write must not be used.
        guard = _dict_version_guard(self.dicts) if self._checks == _CHECKS_IN_PYTHON else None
        self._checks += 1
        if dict_version is None or list(map(dict_version, self.dicts)) != self._versions:
            return False
        self._guard = guard
        return True


_CHECKS_IN_PYTHON = 2
_GROUP = 32


def _dict_version_guard(dicts: Sequence[Any]) -> Callable[[], bool] | None:
    """Return torch's own check that no dict is written from now on; None if torch has none."""
    # Graphs that were loaded do not need Dynamo, and importing it takes a second.
    if dict_version is None or "torch._dynamo.guards" not in sys.modules:
        return None
    # Adding a guard takes time in proportion to those at its level.
    groups = [list(dicts[i : i + _GROUP]) for i in range(0, len(dicts), _GROUP)]
    try:
        kind = torch_compat.GUARD_MANAGER_TYPE.value.GUARD_MANAGER
        root = torch_compat.ROOT_GUARD_MANAGER.value()
        for i, group in enumerate(groups):
            inner = root.list_getitem_manager(i, "", group, kind)
            for j, one in enumerate(group):
                inner.list_getitem_manager(j, "", one, kind).add_dict_version_guard(one, [""], None)
        if not root.check(groups):
            return None
    except Exception:  # a private API of torch; comparing in Python does the same, slower
        return None
    return functools.partial(root.check, groups)


class TensorGuard:
    """The dtypes, devices, sizes, strides and gradient flags of some tensors, compared by torch's own guards."""

    __slots__ = ("_check", "_tensors", "ids")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Torch's guards take each tensor once.
        self._tensors = tuple({id(t): t for t in tensors}.values())
        self.ids = frozenset(map(id, self._tensors))
        self._check = tensor_check(self._tensors)

    def is_current(self) -> bool:
        """Return whether nothing has changed; False for tensors that torch's guards do not take."""
        return self._check is not None and self._check(*self._tensors)


TENSOR_TYPES = (Tensor, nn.Parameter)
"""The classes of tensors that torch's guards take."""


def tensor_check(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """Return torch's own check that tensors have the dtypes, devices, sizes, strides and flags that these have now.

    None if one of them is no ordinary tensor, or stands there twice.
    """
    if not tensors or any(type(t) not in TENSOR_TYPES for t in tensors):
        return None
    try:
        sizes: Any = [list(t.shape) for t in tensors]
        strides: Any = [list(t.stride()) for t in tensors]
        check = torch_compat.TENSOR_GUARDS.value(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        return check if check(*tensors) else None
    except Exception:  # a private API of torch; comparing in Python does the same, slower
        return None


class _Fetched:
    """The tensors of a fetch, the dicts they came from if these have versions, and what the tensors were like."""

    __slots__ = ("guard", "snapshot", "stamp", "tensors", "trusted")

    def __init__(self, tensors: tuple[Any, ...], stamped: Sequence[int]) -> None:
        self.tensors = tensors
        self.snapshot: DictSnapshot | None = None
        # Before anything is computed from them, so that what is written meanwhile is noticed.
        self.stamp = _stamp_of(tensors, stamped)
        self.guard = TensorGuard(tensors)
        # A guard that covers these, and that the caller had checked when they were compared last.
        self.trusted: TensorGuard | None = None

    def is_from(self, owner: nn.Module) -> bool:
        """Return whether a lookup would give the same tensors."""
        # A replica of a module shares its code and holds other tensors.
        dicts = self.snapshot
        return dicts is not None and dicts.dicts[0] is owner.__dict__ and dicts.is_current()


def _stamp_of(tensors: tuple[Any, ...], stamped: Sequence[int]) -> Any:
    if not stamped:
        return None
    return mutation_stamp(tensors if len(stamped) == len(tensors) else [tensors[i] for i in stamped])


class WeightFetch:
    """Fetches the tensors at some targets below a module, as they are at each call.

    It returns the same tuple only if the tensors are the same, with the same dtypes, devices, sizes, strides and gradient
    flags, and those that are `stamped` were not written, as far as version counters go. A target that goes through code
    of a class (a property) is looked up every time, and so are all where dicts have no version.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._paths = [target.split(".") for target in targets]
        # One value, so that threads see it whole.
        self._last: _Fetched | None = None
        self._stamped: tuple[int, ...] = ()
        self._checked_by: tuple[int, TensorGuard] | None = None

    def stamp(self, indices: Iterable[int]) -> bool:
        """Compare addresses and version counters of some of the tensors from the next call on; return whether it does."""
        stamped = tuple(sorted({*self._stamped, *indices}))
        if stamped == self._stamped:
            return True
        self._stamped, self._last = stamped, None
        return False

    def trust(self, guard: TensorGuard | None) -> None:
        """Do not compare, in the next call on this thread, what a guard that was checked just now covers."""
        self._checked_by = None if guard is None else (threading.get_ident(), guard)

    def __call__(self, owner: nn.Module) -> tuple[Any, ...]:
        if torch.compiler.is_compiling():
            return self._lookup(owner)
        last = self._last
        if last is not None and last.is_from(owner):
            if not self._is_unchanged(last):
                self._last = last = self._fetched(last.tensors, last.snapshot)
            return last.tensors
        tables = None if dict_version is None else self._tables(owner)
        # Read before the lookup, so that the next call notices what is written meanwhile.
        snapshot = None if tables is None else DictSnapshot(tables)
        tensors = self._lookup(owner)
        is_same = last is not None and all(map(operator.is_, tensors, last.tensors))
        if last is None or not is_same or not self._is_unchanged(last):
            last = self._fetched(tensors, snapshot)
        else:
            last.snapshot = snapshot
        self._last = last
        return last.tensors

    def _fetched(self, tensors: tuple[Any, ...], snapshot: DictSnapshot | None) -> _Fetched:
        # A tuple of its own: that of the last call stands for what the tensors were then.
        fetched = _Fetched((*tensors,), self._stamped)
        fetched.snapshot = snapshot
        return fetched

    def _is_unchanged(self, last: _Fetched) -> bool:
        checked_by, self._checked_by = self._checked_by, None
        checked = checked_by[1] if checked_by is not None and checked_by[0] == threading.get_ident() else None
        if checked is None or checked is not last.trusted:
            if not last.guard.is_current():
                return False
            last.trusted = checked if checked is not None and last.guard.ids <= checked.ids else None
        return last.stamp == _stamp_of(last.tensors, self._stamped)

    def _lookup(self, owner: nn.Module) -> tuple[Any, ...]:
        values: list[Any] = []
        for path in self._paths:
            value: Any = owner
            for atom in path:
                value = getattr(value, atom)
            values.append(value)
        return tuple(values)

    def _tables(self, owner: nn.Module) -> list[dict[str, Any]] | None:
        """Return every dict that a lookup reads, that of the module itself first; None if one also runs code."""
        tables: dict[int, dict[str, Any]] = {id(owner.__dict__): owner.__dict__}
        for path in self._paths:
            at = owner
            for atom in path[:-1]:
                tables[id(at.__dict__)], tables[id(at._modules)] = at.__dict__, at._modules
                child = at._modules.get(atom)
                if child is None or atom in at.__dict__ or hasattr(type(at), atom):
                    return None
                at = child
            places = (at.__dict__, at._parameters, at._buffers)
            if hasattr(type(at), path[-1]) or not any(path[-1] in place for place in places):
                return None
            tables.update((id(place), place) for place in places)
        return list(tables.values())


@runtime_checkable
class WeightedCall(Protocol):
    """A call in a graph that can take the tuple of all weights in place of those among its operands."""

    def with_weights(
        self, fetch: WeightFetch, operands: Mapping[int, int], sentinels: Sequence[int]
    ) -> Callable[..., Any]:
        """Return the call of the other operands and the tuple, `weights`.

        `operands` are the indices in the tuple of the operands that are weights, and `sentinels` those of counters.
        """
        ...


SENTINELS = "sentinels"
"""The argument of calls that has the counters of batch norms."""


def merge_weight_fetches(graph: Graph, is_tensor: Callable[[str], bool]) -> WeightFetch | None:
    """Make a graph fetch all its tensors by one call of `FETCH_METHOD`; None if it has none.

    Calls that can take all weights as they were fetched do so: passing a hundred one by one takes longer than
    checking them.
    """
    fetched = [node for node in graph.nodes if node.op == "get_attr" and is_tensor(cast("str", node.target))]
    if not fetched:
        return None
    with graph.inserting_before(fetched[0]):
        # In generated code a method is called like a module.
        weights = graph.create_node("call_module", FETCH_METHOD)
    targets: dict[str, int] = {}
    index = {node: targets.setdefault(cast("str", node.target), len(targets)) for node in fetched}
    fetch = WeightFetch(list(targets))
    for node in graph.nodes:
        if isinstance(node.target, WeightedCall):
            operands = {
                i: index[arg] for i, arg in enumerate(node.args) if isinstance(arg, Node) and arg in index
            }
            if not operands:
                continue  # it may come before the weights are fetched
            counters = [index[counter] for counter in node.kwargs.get(SENTINELS, ())]
            node.target = node.target.with_weights(fetch, operands, counters)
            node.args = tuple(arg for i, arg in enumerate(node.args) if i not in operands)
            node.kwargs = {"weights": weights}
    for node in fetched:
        if not node.users:
            graph.erase_node(node)
            continue
        node.op, node.target, node.args = "call_function", operator.getitem, (weights, index[node])
    return fetch
