"""The matcher: all occurrences of a template whose first result is a given node.

The problem is rooted subgraph isomorphism of labelled DAGs with commutative operations, alternatives and optional casts.
Fixing the image of one result makes it a backtracking unification (Robinson 1965): an agenda of pairs (template part,
graph part) is resolved from the root backwards along arguments; a pair either fails, adds the pairs of its arguments, or
branches (swapped operands of a commutative operation, the alternatives of an `either`, a cast that may be absent). Further
results are reached forwards, through the readers of what is matched. Operands are bound consistently, and no node is matched
twice (as in Ullmann 1976). Without branching a match is linear in the template; branching is exponential in the worst case,
so a search stops after `_MAX_TRIES` branches, and a comparison of targets prunes most of them at once.

A loose matcher ignores sizes and literals; what it finds is proven by a strict one on a template traced on the operands
that were bound.

References: Ullmann, "An Algorithm for Subgraph Isomorphism", J. ACM 23(1), 1976; Robinson, "A Machine-Oriented Logic
Based on the Resolution Principle", J. ACM 12(1), 1965.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from dovetail.ir.graph_module import attribute
from dovetail.ir.op_traits import is_commutative, target_name, traits_of
from dovetail.ir.schema import named_arguments, op_name
from dovetail.rules.patterns.match_state import (
    CastChoice,
    ChosenAlternative,
    MatchState,
    NearMiss,
    Pair,
    SameNumber,
    argument_name,
    describe_argument,
    describe_mismatch,
    reads_integers,
    same_literal,
    same_metadata,
    same_pairs,
    same_shape,
    same_tensor,
)
from dovetail.rules.patterns.template import (
    Path,
    Template,
    Where,
    alternatives_of,
    cast_operand,
    has_tensors,
    is_choice,
    is_operation,
    leaves,
    site_of,
)

_VIEWS = frozenset({"reshape", "view", "unsqueeze", "squeeze", "clone", "alias", "flatten"})
_CASTS = frozenset({"_to_copy", "to"})
_DIMS = frozenset({"dim", "dims", "dim0", "dim1"})
THROUGH_OPTIONS = ("views", "casts")


class TransparentOps:
    """Operations that the graph may have between those of a pattern (`through`).

    These are views that keep the elements in order, where the operations around them still compute the same elements in
    the same order, and casts between floating-point dtypes.
    """

    def __init__(self, what: Iterable[str]) -> None:
        self.views, self.casts = "views" in what, "casts" in what

    def source(self, node: Node) -> Node | None:
        """Return the operand of a transparent operation, None for any other."""
        name = op_name(node.target)
        operand: Any = named_arguments(node).get("self")
        if not isinstance(operand, Node):
            return None
        before, after = operand.meta.get("val"), node.meta.get("val")
        if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.device != after.device:
            return None
        is_view = self.views and name in _VIEWS
        is_cast = self.casts and name in _CASTS
        floats = before.is_floating_point() and after.is_floating_point()
        return operand if is_view or (is_cast and floats) else None

    def same_dim(self, where: Where, state: MatchState, ours_dim: Any, their_dim: Any) -> bool:
        """Whether an argument is a dim and two values of it are the same counted from the end."""
        node = state.nodes.get(where[0]) if where is not None else None
        if node is None or where is None or not self.views or argument_name(where) not in _DIMS:
            return False
        if type(ours_dim) is not int or type(their_dim) is not int:
            return False
        left, right = _first_tensor(where[0]), _first_tensor(node)
        return left is not None and right is not None and ours_dim - left.dim() == their_dim - right.dim()

    def same_value(self, ours: Node, theirs: Node, same_number: SameNumber) -> bool:
        """Whether two values agree up to the transparent operations before them."""
        left, right = ours.meta.get("val"), theirs.meta.get("val")
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            return same_metadata(left, right, same_number) and _same_operands(ours, theirs, same_number)
        both_floats = left.is_floating_point() and right.is_floating_point()
        if left.dtype != right.dtype and not (self.casts and both_floats):
            return False
        if left.device != right.device:
            return False
        if not self.views:
            return same_shape(left, right, same_number)
        return _same_elements(ours, theirs, same_number)


def _same_elements(ours: Node, theirs: Node, same_number: SameNumber) -> bool:
    """Whether an operation computes the same elements in the same order from operands that differ only in shape.

    It does if the operands have the same shapes; if it is elementwise and broadcasts along leading dims alone; and
    otherwise if the dims that matter to it are trailing ones, of the same sizes in both.
    """
    if _same_operands(ours, theirs, same_number):
        return same_shape(ours.meta["val"], theirs.meta["val"], same_number)
    left, right = _tensor_operands(ours), _tensor_operands(theirs)
    if len(left) != len(right) or not same_number(ours.meta["val"].numel(), theirs.meta["val"].numel()):
        return False
    if traits_of(ours).pointwise:
        return all(_tiles(n, ours) for n in left) and all(_tiles(n, theirs) for n in right)
    count = _significant_dims(ours)
    if count is None or not _same_shapes(left[1:], right[1:], same_number):
        return False
    mine, other = left[0].meta["val"].shape, right[0].meta["val"].shape
    if min(len(mine), len(other)) < count:
        return False
    tails = zip(mine[len(mine) - count :], other[len(other) - count :], strict=True)
    return all(same_number(a, b) for a, b in tails)


def _same_operands(ours: Node, theirs: Node, same_number: SameNumber) -> bool:
    """Whether the tensors that two operations read have the same shapes, commutative operands in either order."""
    left, right = _tensor_operands(ours), _tensor_operands(theirs)
    if len(left) != len(right):
        return False
    if _same_shapes(left, right, same_number):
        return True
    if len(left) != 2 or not is_commutative(ours):
        return False
    # Swapped, but only where the sizes distinguish the two.
    one, two = (n.meta["val"].numel() for n in left)
    return not same_number(one, two) and _same_shapes(left, right[::-1], same_number)


def _significant_dims(node: Node) -> int | None:
    """Return the number of trailing dims of the first operand that matter to an operation, None if unknown."""
    arguments, name = named_arguments(node), op_name(node.target)
    operands = _tensor_operands(node)
    rank = operands[0].meta["val"].dim()
    if name == "linear":
        return 1
    if name == "matmul":
        return 1 if len(operands) == 2 and operands[1].meta["val"].dim() <= 2 else None
    shape = arguments.get("normalized_shape")
    if isinstance(shape, (list, tuple)):
        return len(cast("list[Any]", shape))
    if len(operands) > 1:
        return None
    values = [arguments[n] for n in _DIMS if n in arguments]
    dims = [d for v in values for d in (cast("list[Any]", v) if isinstance(v, (list, tuple)) else [v])]
    if not dims or not all(type(d) is int and 0 <= d < rank for d in dims):
        return None
    return rank - min(dims)


def _tiles(operand: Node, result: Node) -> bool:
    """Whether an operand is broadcast along leading dims alone, so that it is read in order, repeatedly."""
    mine, whole = list(operand.meta["val"].shape), list(result.meta["val"].shape)
    while mine and _same_size(mine[0], 1):
        mine.pop(0)
    return len(mine) <= len(whole) and all(
        _same_size(a, b) for a, b in zip(mine, whole[len(whole) - len(mine) :], strict=True)
    )


def _same_size(a: Any, b: Any) -> bool:
    """Whether two sizes of one graph are equal; symbolic ones are compared by expression."""
    left = a.node.expr if isinstance(a, SymInt) else a
    right = b.node.expr if isinstance(b, SymInt) else b
    return bool(left == right)


def _same_shapes(left: list[Node], right: list[Node], same_number: SameNumber) -> bool:
    return all(
        same_shape(a.meta["val"], b.meta["val"], same_number) for a, b in zip(left, right, strict=True)
    )


def _tensor_operands(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]


def _first_tensor(node: Node) -> Tensor | None:
    operands = _tensor_operands(node)
    return operands[0].meta["val"] if operands else None


_MAX_TRIES = 2_000

# Arguments that select a library and do not change what is computed.
_SETTINGS = frozenset({"cudnn_enable", "cudnn_enabled"})


class Matcher:
    """Matches one template.

    A loose matcher compares operators and wiring and accepts any literal. A strict one, whose template was traced on
    the bound operands themselves, compares every literal, size and dtype too.
    """

    def __init__(
        self,
        template: Template,
        *,
        strict: bool,
        constant: Callable[[Node], Tensor | None],
        order: Callable[[Node], int],
        through: TransparentOps | None = None,
    ) -> None:
        self.template, self.strict = template, strict
        self.constant, self.order, self.through = constant, order, through
        fake_env = template.fake_env
        self.same_number: SameNumber = operator.eq if fake_env is None else fake_env.same_number
        self.literal_at: dict[tuple[Node, Path], str] = {
            place: name for name, places in template.literals.items() for place in places
        }
        self.argument = {node: name for name, node in template.operands.items()}
        self.miss: NearMiss | None = None
        self._tries = 0
        self._furthest = -1
        self._slots: dict[Node, list[tuple[Path, Any, bool]]] = {}

    def find(self, root: Node, operands: Mapping[Node, Node] | None = None) -> Iterator[MatchState]:
        """Yield every match in which the template's first result is `root`, with some operands bound beforehand."""
        self.miss, self._tries, self._furthest = None, 0, -1
        start = MatchState(operands=dict(operands or {}))
        yield from self._solve([(self.template.root, root, None)], start)

    def _solve(self, agenda: list[Pair], state: MatchState) -> Iterator[MatchState]:
        """Resolve the pairs of the agenda; at a branch each way is tried in turn."""
        self._tries += 1
        if self._tries > _MAX_TRIES:
            return
        while agenda:
            ours, theirs, where = agenda.pop()
            branches = self._resolve(ours, theirs, where, state)
            if branches is None:
                return
            if len(branches) == 1:
                agenda.extend(branches[0])
                continue
            for branch in branches:
                yield from self._solve([*agenda, *branch], state.copy())
            return
        rest = self._unmatched(state)
        if rest is None:
            if self._operands_outside(state):
                yield state
            return
        ours, choices = rest
        if not choices:
            self._missed(
                state, f"no other reader of its operands is the pattern's '{target_name(ours)}'", None
            )
        for theirs in choices:
            yield from self._solve([(ours, theirs, None)], state.copy())

    def _resolve(self, ours: Any, theirs: Any, where: Where, state: MatchState) -> list[list[Pair]] | None:
        """Return the agendas that follow from pairing a part of the template with one of the graph, None if they differ."""
        if isinstance(ours, ChosenAlternative):
            state.sites[ours.site] = ours.number
            return [[]]
        if isinstance(ours, CastChoice):
            if ours.present:
                return self._resolve_operation(ours.node, theirs, state)
            state.skipped.add(ours.node)
            return [[(cast_operand(ours.node), theirs, None)]]
        if not isinstance(ours, Node):
            return self._resolve_literal(ours, theirs, where, state)
        if ours.op == "placeholder":
            return [[]] if self._bind(ours, theirs, state) else None
        if ours.op == "get_attr":
            return [[]] if self._same_constant(ours, theirs, state) else None
        if ours not in self.template.operations:
            if self.strict and not self._same_size(ours, theirs):
                return self._refuse(state, ours, theirs)
            return [[]]
        if not isinstance(theirs, Node):
            return self._refuse(state, ours, theirs)
        if is_choice(ours):
            return self._resolve_either(ours, theirs, state)
        known = state.nodes.get(ours)
        if known is not None:
            return [[]] if known is theirs else self._refuse(state, ours, theirs)
        if ours in self.template.skippable:
            return self._resolve_cast(ours, theirs, state)
        return self._resolve_operation(ours, theirs, state)

    def _resolve_cast(self, ours: Node, theirs: Node, state: MatchState) -> list[list[Pair]] | None:
        """Resolve a cast that depends on the precision: as present where the graph has a cast, and as absent."""
        if ours not in state.skipped and theirs.target is ours.target and theirs not in state.taken:
            return [[(CastChoice(ours, present), theirs, None)] for present in (True, False)]
        state.skipped.add(ours)
        return [[(cast_operand(ours), theirs, None)]]

    def _resolve_operation(self, ours: Node, theirs: Node, state: MatchState) -> list[list[Pair]] | None:
        if theirs in state.taken or ours.target is not theirs.target or theirs.op != "call_function":
            return self._look_through(ours, theirs, state)
        if self.strict and not self._same_value(ours, theirs):
            return self._missed(state, "its dtype or shape is not what the pattern would compute", theirs)
        state.nodes[ours] = theirs
        state.taken.add(theirs)
        return self._arguments(ours, theirs, state)

    def _resolve_either(self, ours: Node, theirs: Node, state: MatchState) -> list[list[Pair]] | None:
        known = state.joined.setdefault(ours, theirs)
        if known is not theirs:
            return self._refuse(state, ours, theirs)
        site = site_of(ours)
        chosen = state.sites.get(site)
        possible = [
            (k, alternative)
            for k, alternative in enumerate(alternatives_of(ours))
            if chosen in (None, k) and self._may_match(alternative, theirs)
        ]
        if not possible:
            return self._refuse(state, alternatives_of(ours)[chosen or 0], theirs)
        return [[(a, theirs, None), (ChosenAlternative(site, k), None, None)] for k, a in possible]

    def _arguments(self, ours: Node, theirs: Node, state: MatchState) -> list[list[Pair]] | None:
        pairs: list[Pair] = []
        if not self._pairs(ours, theirs.args, theirs.kwargs, state, pairs):
            return self._missed(
                state, f"its arguments are not those of the pattern's '{target_name(ours)}'", theirs
            )
        possible = [pairs[::-1]] if self._fit(pairs, state) else []
        if ours in self.template.commutative and is_commutative(theirs):
            swapped: list[Pair] = []
            args = (theirs.args[1], theirs.args[0], *theirs.args[2:])
            fits = self._pairs(ours, args, theirs.kwargs, state, swapped)
            if fits and not same_pairs(swapped, pairs) and self._fit(swapped, state):
                possible.append(swapped[::-1])
        return possible or None

    def _fit(self, pairs: list[Pair], state: MatchState) -> bool:
        """Whether all pairs of arguments may match; a pair that cannot is recorded as a miss."""
        unfit = next((p for p in pairs if not self._may_match(p[0], p[1])), None)
        if unfit is not None:
            self._refuse(state, unfit[0], unfit[1])
        return unfit is None

    def _may_match(self, ours: Any, theirs: Any) -> bool:
        """Whether two parts may match, by their targets alone."""
        if not isinstance(ours, Node) or ours.op != "call_function":
            return True
        if ours not in self.template.operations or self.through is not None:
            return True
        if not isinstance(theirs, Node):
            return False
        if is_choice(ours):
            return any(self._may_match(a, theirs) for a in alternatives_of(ours))
        if ours in self.template.skippable and self._may_match(cast_operand(ours), theirs):
            return True
        return ours.target is theirs.target

    def _pairs(
        self,
        ours: Node,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        state: MatchState,
        pairs: list[Pair],
    ) -> bool:
        """Append the pairs of arguments of two nodes to `pairs`; False if their structures differ."""
        if len(ours.args) != len(args) or len(ours.kwargs) != len(kwargs):
            return False
        for path, value, deep in self._slots_of(ours):
            key = path[1]
            if path[0] == 0:
                other = args[key]
            elif key in kwargs:
                other = kwargs[key]
            else:
                return False
            if deep:
                if not self._pair(value, other, path, ours, state, pairs):
                    return False
            elif self.strict or isinstance(other, Node) or isinstance(value, Node):
                pairs.append((value, other, (ours, path)))
        return True

    def _slots_of(self, node: Node) -> list[tuple[Path, Any, bool]]:
        """Return the arguments of a template's node: path, value, and whether to descend into it."""
        known = self._slots.get(node)
        if known is None:
            known = self._slots[node] = []
            for path, value in (
                *(((0, i), v) for i, v in enumerate(node.args)),
                *(((1, k), v) for k, v in node.kwargs.items()),
            ):
                captured = any(place[0] is node and place[1][:2] == path for place in self.literal_at)
                inside = isinstance(value, (tuple, list, Mapping)) and (
                    self.strict or any(isinstance(leaf, Node) for _, leaf in leaves(value))
                )
                known.append((path, value, captured or inside))
        return known

    def _pair(
        self, ours: Any, theirs: Any, path: Path, node: Node, state: MatchState, pairs: list[Pair]
    ) -> bool:
        """Append the pairs of parts of two arguments to `pairs`; False if their structures differ."""
        name = self.literal_at.get((node, path))
        if name is not None:
            return self._capture(name, theirs, state)
        if isinstance(ours, Node):
            pairs.append((ours, theirs, (node, path)))
            return True
        if isinstance(ours, (tuple, list)) and isinstance(theirs, (tuple, list)):
            left, right = cast("list[Any]", ours), cast("list[Any]", theirs)
            if len(left) != len(right):
                return not self.strict and not any(isinstance(v, Node) and is_operation(v) for v in left)
            return all(
                self._pair(a, b, (*path, i), node, state, pairs)
                for i, (a, b) in enumerate(zip(left, right, strict=True))
            )
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            mine, other = cast("Mapping[str, Any]", ours), cast("Mapping[str, Any]", theirs)
            return mine.keys() == other.keys() and all(
                self._pair(mine[k], other[k], (*path, k), node, state, pairs) for k in mine
            )
        pairs.append((ours, theirs, (node, path)))
        return True

    def _resolve_literal(
        self, ours: Any, theirs: Any, where: Where, state: MatchState
    ) -> list[list[Pair]] | None:
        if isinstance(theirs, Node) and has_tensors(theirs.meta.get("val")):
            return self._missed(state, f"the pattern has {ours!r} where the graph has a tensor", theirs)
        if ours is None and theirs is not None and not self.strict:
            # Whether an operand is absent is part of the form; the value of any other literal is not.
            return None if isinstance(theirs, Node) else [[]]
        if not self.strict:
            return [[]]
        if isinstance(theirs, Node):
            theirs = theirs.meta.get("val", ...)
        if (
            argument_name(where) in _SETTINGS
            or self._same_literal(ours, theirs, where)
            or (self.through is not None and self.through.same_dim(where, state, ours, theirs))
        ):
            return [[]]
        at = state.nodes.get(where[0]) if where is not None else None
        return self._missed(
            state, f"{describe_argument(where)} {theirs!r} where the pattern has {ours!r}", at
        )

    def _bind(self, ours: Node, theirs: Any, state: MatchState) -> bool:
        name = self.argument[ours]
        if not isinstance(theirs, Node):
            self._missed(state, f"the pattern's operand '{name}' is the literal {theirs!r}", None)
            return False
        known = state.operands.setdefault(ours, theirs)
        if known is not theirs:
            self._missed(state, f"the pattern's operand '{name}' is '{known.name}' elsewhere", theirs)
        return known is theirs

    def _capture(self, name: str, theirs: Any, state: MatchState) -> bool:
        if isinstance(theirs, Node):
            self._missed(state, f"the literal '{name}' is computed in the graph", theirs)
            return False
        value = list(cast("list[Any]", theirs)) if isinstance(theirs, (list, tuple)) else theirs
        if name not in state.literals:
            state.literals[name] = value
            return True
        return same_literal(state.literals[name], value)

    def _same_constant(self, ours: Node, theirs: Any, state: MatchState) -> bool:
        expected = attribute(self.template.program, str(ours.target))
        at = theirs if isinstance(theirs, Node) else None
        actual = self.constant(at) if at is not None else None
        same = expected is not None and actual is not None and same_tensor(expected, actual)
        if not same:
            self._missed(state, "a constant is not the pattern's", at)
        return same

    def _look_through(self, ours: Node, theirs: Node, state: MatchState) -> list[list[Pair]] | None:
        source = self.through.source(theirs) if self.through is not None else None
        if source is None or theirs in state.taken:
            return self._refuse(state, ours, theirs)
        state.through.append(theirs)
        state.taken.add(theirs)
        return [[(ours, source, None)]]

    def _unmatched(self, state: MatchState) -> tuple[Node, list[Node]] | None:
        """Return an unmatched operation that reads a matched value, and the nodes it may match; None if all match."""
        matched = state.nodes.keys() | state.skipped
        missing = [n for n in self.template.calls(state.sites) if n not in matched]
        if not missing:
            return None
        for ours in missing:
            for used in ours.all_input_nodes:
                source = state.nodes.get(used) or state.operands.get(used)
                if source is not None:
                    users = [u for u in source.users if u.target is ours.target and u not in state.taken]
                    return ours, sorted(users, key=self.order)
        return missing[0], []

    def _operands_outside(self, state: MatchState) -> bool:
        for ours, theirs in state.operands.items():
            if theirs in state.taken:
                what = f"the pattern's operand '{self.argument[ours]}' is computed inside the match"
                self._missed(state, what, theirs)
                return False
        return True

    def _same_value(self, ours: Node, theirs: Node) -> bool:
        if self.through is not None:
            return self.through.same_value(ours, theirs, self.same_number)
        return same_metadata(ours.meta.get("val"), theirs.meta.get("val"), self.same_number)

    def _same_size(self, ours: Node, theirs: Any) -> bool:
        value = theirs.meta.get("val") if isinstance(theirs, Node) else theirs
        return self.same_number(ours.meta.get("val"), value)

    def _same_literal(self, ours: Any, theirs: Any, where: Where) -> bool:
        if isinstance(ours, (int, torch.SymInt)) and isinstance(theirs, torch.SymInt):
            return self.same_number(ours, theirs)
        if not same_literal(ours, theirs):
            return False
        return type(ours) is type(theirs) or where is None or not reads_integers(where[0])

    def _refuse(self, state: MatchState, ours: Node, theirs: Any) -> None:
        if len(state.nodes) <= self._furthest:
            return
        if is_choice(ours):
            ours = alternatives_of(ours)[0]
        reason = describe_mismatch(ours, theirs)
        if ours.op == "placeholder":
            reason = f"the pattern has its operand '{self.argument[ours]}' there"
        elif isinstance(theirs, Node) and theirs in state.taken:
            reason = f"'{theirs.name}' would match two operations of the pattern"
        self._missed(state, reason, theirs if isinstance(theirs, Node) else None)

    def _missed(self, state: MatchState, reason: str, at: Node | None) -> None:
        if len(state.nodes) > self._furthest:
            self._furthest = len(state.nodes)
            self.miss = NearMiss(tuple(state.nodes.values()), reason, at, dict(state.sites))
