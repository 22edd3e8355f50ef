"""Why something that looks like attention is none that is known: what stands between its two products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.fx import Node

from dovetail.graph.normalform import by_name, op_name
from dovetail.outlining.requests import is_projection
from dovetail.rules.library.attention_steps import attention_kind
from dovetail.rules.library.known import Known
from dovetail.rules.matching.shadow import shadow_of
from dovetail.rules.rule import Proposal, Refusal, Rule
from dovetail.rules.scene import Scene

_PRODUCTS = frozenset({"matmul", "bmm", "mm", "baddbmm", "einsum"})
_VIEWS = frozenset({"reshape", "view", "unsqueeze", "squeeze", "expand", "clone"})
_BEFORE = frozenset({"mul", "div", "add", "sub", "masked_fill", "where", "_to_copy"})
_AFTER = frozenset({"_to_copy", "native_dropout", "dropout"})
_SCALES = frozenset({"mul", "div"})
_MOST_STEPS = 8


class AttentionUnusual(Rule):
    """Proposes nothing: tells of each softmax between two products of which no rule for attention has a word to say."""

    def __init__(self, known: Sequence[Known]) -> None:
        self.name, self.kind, self.reference = "attention_unusual", "attention", attention_kind
        self.known = tuple(known)

    def propose(self, scene: Scene) -> Iterable[Proposal]:
        shadow = scene.fact(shadow_of)
        found = [n for n in shadow.nodes if op_name(n.target) in ("softmax", "_softmax")]
        if not found:
            return
        told = [p for rule in self.known for p in rule.propose(scene)]
        covered = {i for p in told for i in p.members}
        for softmax in found:
            before, after = _way(softmax, back=True), _way(softmax, back=False)
            steps = [n for n in (*before[::-1], softmax, *after) if not is_projection(n)]
            members = sorted({i for n in steps for i in shadow.origins.get(n, ())})
            if not before or not after or covered.intersection(shadow.origins.get(softmax, ())):
                continue
            odd, reason = _odd(softmax, before, after)
            place, usual = shadow.origins.get(odd, ()), len(steps) - (odd is not softmax)
            reason = f"{reason}: {', '.join(op_name(node.target) for node in steps)}"
            yield Refusal(self.name, tuple(members), reason, place[-1] if place else None, usual, len(steps))


def _way(softmax: Node, *, back: bool) -> list[Node]:
    """The operations from a softmax to the nearest product, that one last; none if there is none within reach."""
    reached: dict[Node, Node | None] = {softmax: None}
    edge = [softmax]
    for _ in range(_MOST_STEPS):
        following: list[Node] = []
        for node in edge:
            for other in node.all_input_nodes if back else node.users:
                if other in reached or other.op != "call_function":
                    continue
                reached[other] = node
                if op_name(other.target) in _PRODUCTS:
                    return _path(reached, other)
                following.append(other)
        edge = following
    return []


def _path(reached: dict[Node, Node | None], end: Node) -> list[Node]:
    path: list[Node] = []
    node: Node | None = end
    while node is not None:
        path.append(node)
        node = reached[node]
    return path[-2::-1]


def _odd(softmax: Node, before: Sequence[Node], after: Sequence[Node]) -> tuple[Node, str]:
    """The operation that an attention does not have there, and what is odd about it."""
    value = softmax.meta.get("val")
    if isinstance(value, Tensor) and by_name(softmax).get("dim") != value.dim() - 1:
        return softmax, "its softmax is not over the keys"
    for nodes, usual in ((before, _BEFORE), (after, _AFTER)):
        for node in nodes[:-1]:
            if is_projection(node):
                continue
            name = op_name(node.target)
            if name not in usual | _VIEWS:
                return node, f"attention has no '{name}' there"
            if name in _SCALES and len(node.all_input_nodes) > 1:
                return node, "its scores are scaled by a tensor, not by a literal"
    return softmax, "its steps come in no order that is known of attention"
