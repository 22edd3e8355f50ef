"""Memory that a program writes, as torch's functionalization keeps it: one functional tensor for each alias.

Functionalization lets an in-place operator compute a new value, queues that as an update of the storage, and replays the
updates and the views on another alias when it is next read. Its C++ kernels do this here too, but only for the storages
that are written; what else the program computes never meets them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

from dovetail.graph.capturing.alias_groups import written_operands
from dovetail.graph.capturing.aliasing import storage_of
from dovetail.graph.capturing.parting import Unsure
from dovetail.graph.normalform import by_name

_FUNCTIONALIZE = torch._C.DispatchKey.Functionalize
# Functions of torch that its stubs do not have.
_torch = cast(Any, torch)
_BATCH_NORM = torch.ops.aten.batch_norm.default


class FunctionalMemory:
    """The functional tensors that stand for values on `storages`, which the program writes.

    `tensors` has the one of each node of the program whose value lies there, or those of its parts.
    """

    def __init__(self, storages: set[int]) -> None:
        self.storages = storages
        self.tensors: dict[Node, Any] = {}
        # For each storage of the program: that of its functional tensors, and how often it was written.
        self._functional: dict[int, int] = {}
        self._writes: dict[int, int] = dict.fromkeys(storages, 0)
        self._synced: dict[int, int] = {}

    def holds(self, value: Any) -> bool:
        """Whether a value, or a part of it, lies on memory that is written."""
        return bool(self.storages) and any(storage_of(part) in self.storages for part in _tensors(value))

    def reads(self, node: Node) -> bool:
        """Whether an operand of a node lies on memory that is written."""
        return bool(self.tensors) and any(old in self.tensors for old in node.all_input_nodes)

    def enter(self, node: Node, tensor: Tensor) -> None:
        """Let a functional tensor stand for a value that is the first on its storage, or an alias of that."""
        storage = storage_of(node.meta["val"])
        if self._functional.setdefault(storage, _storage(tensor)) != _storage(tensor):
            raise Unsure(f"'{node.name}' is in memory of another value")
        self.tensors[node] = tensor

    def alias(self, node: Node, result: Any) -> bool:
        """Let the functional tensors of a result stand for a node if they are aliases of values in this memory.

        Raises where the exported values, which other passes may have edited, have other storages in common than these.
        """
        if not isinstance(result, (list, tuple, Tensor)):
            return False
        values, tensors = list(_tensors(node.meta.get("val"))), list(_tensors(result))
        known = set(self._functional.values())
        for value, tensor in zip(values, tensors, strict=True):
            is_alias = is_functional(tensor) and _storage(tensor) in known
            expected = self._functional.get(storage_of(value))
            if is_alias != (expected is not None) or (is_alias and _storage(tensor) != expected):
                raise Unsure(f"'{node.name}' shares other memory than its exported value")
        if not self.holds(node.meta.get("val")):
            return False
        self.tensors[node] = result
        return True

    def note_writes(self, node: Node) -> None:
        """Count the writes of a node; the functional tensors that it writes have them, their aliases have not."""
        nodes = _written_nodes(node)
        storages = {storage_of(old.meta["val"]) for old in nodes}
        for storage in storages:
            self._writes[storage] += 1
        if len(nodes) == len(storages):
            for old in nodes:
                self._synced[id(self.tensors[old])] = self._writes[storage_of(old.meta["val"])]

    def is_stale(self, old: Node) -> bool:
        """Whether the functional tensor of a node may miss updates; it is taken to be synchronized from now on."""
        writes = self._writes[storage_of(old.meta["val"])]
        tensor = self.tensors[old]
        is_stale = self._synced.get(id(tensor), 0) != writes
        self._synced[id(tensor)] = writes
        return is_stale


def written_storages(graph: Graph, exempt: Callable[[Node], bool]) -> set[int]:
    """The storages that the nodes of a graph write, by their exported values, without the nodes that are `exempt`."""
    writers = [node for node in graph.nodes if node.op == "call_function" and not exempt(node)]
    return {storage_of(n.meta["val"]) for node in writers for n in _written_nodes(node)}


def _written_nodes(node: Node) -> list[Node]:
    if node.target is not _BATCH_NORM:
        return [n for n in written_operands(node) if isinstance(n.meta.get("val"), Tensor)]
    # Its schema does not say that it updates the running statistics.
    arguments = by_name(node)
    statistics = [arguments.get(name) for name in ("running_mean", "running_var")]
    return [n for n in statistics if isinstance(n, Node)] if arguments.get("training") is True else []


def _tensors(value: Any) -> Iterator[Tensor]:
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(part, Tensor):
            yield part


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def returns_alias(op: OpOverload) -> bool:
    return any(result.alias_info is not None for result in op._schema.returns)


@contextlib.contextmanager
def functionalization() -> Generator[None]:
    """Dispatch to functionalization kernels, which replay views and write nothing in place."""
    include = torch._C._dispatch_tls_local_include_set() | torch._C.DispatchKeySet(_FUNCTIONALIZE)
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(_FUNCTIONALIZE)
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        replays = _torch._functionalize_enable_reapply_views(True)
        try:
            yield
        finally:
            _torch._functionalize_enable_reapply_views(replays)


def functional_kernel(op: OpOverload) -> Callable[..., Any]:
    """The functionalization kernel of an operator."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(_FUNCTIONALIZE, *args, **kwargs)

    return call


def functional_tensor(value: Tensor) -> Tensor:
    return _torch._to_functional_tensor(value)


def is_functional(value: Tensor) -> bool:
    return _torch._is_functional_tensor(value)


def inner_value(tensor: Tensor) -> Tensor:
    """The value that a functional tensor has had since it was last synchronized."""
    return _torch._from_functional_tensor(tensor)


def synchronize(tensor: Tensor) -> None:
    """Replay the pending updates of a functional tensor's storage, and its views of that."""
    with functionalization():
        _torch._sync(tensor)
