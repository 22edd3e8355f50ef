"""Which operations a compiler knows, found out by giving it some: many at once, and each that is alike only once."""

from __future__ import annotations

import operator
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from dovetail.graph.forking import released_by_fork
from dovetail.lowering.backends.foreign import Foreign
from dovetail.lowering.backends.retelling import INDEXING, alone, written_out
from dovetail.lowering.onnx.types import NoForm


@dataclass(frozen=True)
class Verdict:
    """What became of an operation: the reason why it is not taken, or what to write in its place, if anything."""

    reason: str | None = None
    written: GraphModule | None = None


class _AsItIs(Exception):
    """An operator needs no mending with these arguments."""


class Judge:
    """Asks a compiler about operations.

    `convert` gives a graph to the compiler and raises NoForm for what it does not know. What it does not know is tried
    again in the operations that `table` leads to, those of `foreseen` at once. `sift` says beforehand what is not even
    to be tried. `mends` write an operator that the compiler knows, but gets wrong, in operations that it gets right;
    they give NotImplemented for arguments with which it is right.
    """

    def __init__(
        self,
        convert: Callable[[Graph], Any],
        table: Callable[[], Mapping[Any, Callable[..., Any]]],
        sift: Callable[[Node], str | None],
        foreseen: frozenset[str] = frozenset(),
        mends: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        self.convert, self.table, self.sift, self.foreseen = convert, table, sift, foreseen
        self.mends = {target: _once(mend) for target, mend in (mends or {}).items()}
        self._known: dict[str, Verdict] = {}
        self._lock = released_by_fork(threading.RLock())

    def verdict(self, node: Node, others: Callable[[Node], bool]) -> Verdict:
        """What becomes of a node. Other operations of its graph are tried in the same go, if `others` says so."""
        reason = self.sift(node)
        if reason is not None:
            return Verdict(reason)
        key = signature(node)
        with self._lock:
            if key not in self._known:
                waiting = {key: node}
                for one in node.graph.nodes:
                    if one.op == "call_function" and one.target is not operator.getitem and others(one):
                        waiting.setdefault(signature(one), one)
                self._try([n for k, n in waiting.items() if k not in self._known and self.sift(n) is None])
            return self._known[key]

    def _try(self, nodes: Sequence[Node]) -> None:
        """Try some together; where they fail, halves of them, until it is known which it is."""
        written = self._first(nodes)
        if self._why_not(nodes, written) is None:
            self._known.update({signature(n): Verdict(written=written.get(n)) for n in nodes})
        elif len(nodes) > 1:
            half = len(nodes) // 2
            self._try(nodes[:half])
            self._try(nodes[half:])
        else:
            self._known[signature(nodes[0])] = self._second(nodes[0])

    def _first(self, nodes: Sequence[Node]) -> dict[Node, GraphModule | None]:
        """Those that are not even tried as they are, in other operations; None where there is no such way."""
        written: dict[Node, GraphModule | None] = {}
        for node in nodes:
            if str(node.target) in self.foreseen:
                written[node] = self._written(node)
            elif node.target in self.mends:
                try:
                    written[node] = written_out(node, self.mends, self._mend(node))
                except _AsItIs:
                    pass
                except Exception:  # these arguments are not mended, and must not be taken as they are
                    written[node] = None
        return written

    def _second(self, node: Node) -> Verdict:
        """Try an operation again, written out."""
        written = self._written(node)
        if written is None:
            return Verdict(self._why_not([node], self._first([node])))
        reason = self._why_not([node], {node: written})
        return Verdict(reason) if reason is not None else Verdict(written=written)

    def _written(self, node: Node) -> GraphModule | None:
        """A node in other operations; None if there is no such way to tell it."""
        try:
            table = dict(self.table())
            table.update({target: _either(mend, table.get(target)) for target, mend in self.mends.items()})
            try:
                written = written_out(node, table, self._mend(node))
            except _AsItIs:
                written = written_out(node, table)
        except Exception:  # what torch cannot write out has to be taken as it is, or not at all
            return None
        calls = [n.target for n in written.graph.nodes if n.op == "call_function"]
        held = any(n.op == "get_attr" for n in written.graph.nodes) or any(map(_needs_strides, calls))
        return None if held or calls == [node.target] else written

    def _mend(self, node: Node) -> Callable[..., Any]:
        """What mends an operator, to be written out; raises _AsItIs where nothing is to be mended."""
        mend = self.mends.get(node.target)

        # Written out by name: torch takes many operators apart before a table is asked for them.
        def run(*args: Any, **kwargs: Any) -> Any:
            made = NotImplemented if mend is None else mend(*args, **kwargs)
            if made is NotImplemented:
                raise _AsItIs
            return made

        return run

    def _why_not(self, nodes: Sequence[Node], written: Mapping[Node, GraphModule | None]) -> str | None:
        lost = next((n for n in nodes if n in written and written[n] is None), None)
        if lost is not None:
            return f"{lost.target} cannot be told in simpler operations"
        try:
            self.convert(alone(nodes, written.get))
        except NoForm as failure:
            return str(failure)
        except Exception as error:
            return f"it is not told to the compiler: {_first_line(error)}"
        return None


class Judged(Foreign):
    """A backend that finds out what its compiler takes by giving it some."""

    @abstractmethod
    def judge(self) -> Judge:
        """What is known of the compiler; all backends of a class have the same one."""

    def why_not_operation(self, node: Node) -> str | None:
        return self._verdict(node).reason

    def spelling(self, node: Node) -> GraphModule | None:
        """What is written in place of an operation; None where it is written as it is. Raises NoForm."""
        found = self._verdict(node)
        if found.reason is not None:
            raise NoForm(found.reason)
        return found.written

    def _verdict(self, node: Node) -> Verdict:
        return self.judge().verdict(node, lambda one: self.why_not_plainly(one) is None)


def signature(node: Node) -> str:
    """All that can matter of one operation: its operator, its literals, the dtypes and sizes of what it is given, and
    what of that is the same."""
    places = {one: i for i, one in enumerate(node.all_input_nodes)}
    return f"{node.target} {map_arg((node.args, node.kwargs), lambda n: _described(n, places[n]))!r}"


def reads_itself(node: Node) -> bool:
    """Whether an operation that takes indices takes one value in two places, so that it could not be replaced in one."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return str(node.target) in INDEXING and len(found) != len(set(found))


def why_risky(node: Node) -> str | None:
    """Why an operation is better not even tried, whatever the compiler: some of these make one run for ever."""
    if reads_itself(node):
        return "it takes an index from the tensor that it reads"
    if about_memory(node.target):
        return f"{node.target} is about memory, and a compiler has values"
    first = node.args[0] if node.args else None
    value = first.meta.get("val") if isinstance(first, Node) else None
    named = _name(node.target) not in ("unsqueeze", "squeeze") and any(
        a.name.startswith("dim") for a in cast("Any", node.target)._schema.arguments
    )
    if named and isinstance(value, Tensor) and not value.dim():
        return f"{node.target} is along a dimension of a tensor that has none"
    return None


_STRIDED = ("as_strided", "set", "resize", "view.dtype", "is_contiguous")
_UNSET = ("empty", "new_empty")


def about_memory(target: Any) -> bool:
    """Whether an operator is about how values lie in memory, or shows memory that nobody wrote."""
    return str(target).removeprefix("aten.").startswith((*_STRIDED, *_UNSET))


def _name(target: Any) -> str:
    """The name of an operator without its overload."""
    return str(target).removeprefix("aten.").partition(".")[0]


def _needs_strides(target: Any) -> bool:
    return str(target).removeprefix("aten.").startswith(_STRIDED)


def _once(mend: Callable[..., Any]) -> Callable[..., Any]:
    """A mend that leaves the operator alone where it is used by the mend itself."""
    inside = threading.local()

    def run(*args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "here", False):
            return NotImplemented
        inside.here = True
        try:
            return mend(*args, **kwargs)
        finally:
            inside.here = False

    return run


def _either(mend: Callable[..., Any], otherwise: Callable[..., Any] | None) -> Callable[..., Any]:
    """A mend, and what is in a table where it has nothing to mend."""

    def run(*args: Any, **kwargs: Any) -> Any:
        made = mend(*args, **kwargs)
        return made if made is not NotImplemented or otherwise is None else otherwise(*args, **kwargs)

    return run


def _described(node: Node, place: int) -> Any:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return _Text(f"<{place} {value.dtype} {tuple(value.shape)}>")
    return _Text(f"<{place} {type(cast('object', value)).__name__}>")


class _Text(str):
    """Stands for a value in a signature, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()[
        :200
    ]
