"""Near-misses: the operations of a rule's pattern beside those of the graph, with the one that differs marked.

A ledger has how many operations of a pattern matched and where the match failed, but not which form of the pattern it
was. Of the forms with that many operations the one is shown whose sequence of operators is most like that of the graph's
operations: both sequences are in the order of the data, and are aligned by their longest common parts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

import torch
from torch.fx import Node

from dovetail.errors import DovetailError
from dovetail.fusion.ledger_entries import Declined
from dovetail.ir.op_traits import target_name
from dovetail.rules.patterns.pattern_rule import PatternRule
from dovetail.rules.patterns.template import Template, alternatives_of, is_choice, is_operation, reachable
from dovetail.rules.patterns.trace import CAPTURED
from dovetail.rules.rule import Rule

_MOST = 200
_MOST_FORMS = 64
_DIFFERS = 1
_ABSENT = 2
_EMPTY = 3


class NearMissDocument:
    """Collects the near-misses of a ledger, each distinct comparison once."""

    def __init__(self, rules: Iterable[Rule], nodes: Mapping[str, Node], order: Mapping[str, int]) -> None:
        self.rules = {rule.name: rule for rule in rules if isinstance(rule, PatternRule)}
        self.nodes, self.order = nodes, order
        self.rows: list[dict[str, Any]] = []
        self._templates: dict[str, list[Template]] = {}
        self._numbers: dict[Any, int] = {}

    def number(self, entry: Declined) -> int | None:
        """Return the number of the comparison for a refusal; None if there is none to show."""
        if not entry.wanted or entry.rule not in self.rules or len(self.rows) >= _MOST:
            return None
        names = [name for name in dict.fromkeys((*entry.nodes, entry.place or "")) if name in self.nodes]
        names.sort(key=self.order.__getitem__)
        operators = [target_name(self.nodes[name]) for name in names]
        key = (entry.rule, entry.wanted, tuple(names))
        if key not in self._numbers:
            pattern = self._nearest(entry, operators)
            if pattern is None:
                return None
            self._numbers[key] = len(self.rows)
            self.rows.append(_compared(self.rules[entry.rule], pattern, operators, names, entry))
        return self._numbers[key]

    def _nearest(self, entry: Declined, operators: Sequence[str]) -> list[str] | None:
        """Return the operators of the form of a rule's pattern that is most like those of the graph."""
        if entry.rule not in self._templates:
            self._templates[entry.rule] = _templates(self.rules[entry.rule])
        forms = [
            form for template in self._templates[entry.rule] for form in _forms(template, set(operators))
        ]

        def likeness(form: list[str]) -> tuple[bool, float]:
            ratio = difflib.SequenceMatcher(None, form, operators, autojunk=False).ratio()
            return len(form) == entry.wanted, ratio

        return max(forms, key=likeness, default=None)


def _templates(rule: PatternRule) -> list[Template]:
    try:
        return rule.variants.loose(CAPTURED, {torch.float32})
    except DovetailError:
        return []


def _forms(template: Template, operators: set[str]) -> Iterator[list[str]]:
    """Yield the operators of a template in the order of the data, for alternatives that the graph may have meant.

    They are those with the fewest operators that the graph has not; of equals every combination, up to a bound.
    """
    nodes = list(template.program.graph.nodes)
    # In the order of the graph, so that what a node reads is known.
    missing: dict[Node, int] = {}
    ways: dict[Node, list[int]] = {}
    for node in nodes:
        if is_choice(node):
            counts = [missing[alternative] for alternative in alternatives_of(node)]
            missing[node] = min(counts)
            ways[node] = [k for k, count in enumerate(counts) if count == missing[node]]
        else:
            own = is_operation(node) and target_name(node) not in operators
            missing[node] = own + sum(missing[used] for used in node.all_input_nodes)
    for picks in islice(product(*ways.values()), _MOST_FORMS):
        calls = set(reachable(template.outputs, dict(zip(ways, picks, strict=True)).__getitem__))
        yield [target_name(node) for node in nodes if node in calls]


def _compared(
    rule: PatternRule, pattern: Sequence[str], operators: Sequence[str], names: Sequence[str], entry: Declined
) -> dict[str, Any]:
    """Return both sequences in step: where one has nothing the other's operation differs."""
    matcher = difflib.SequenceMatcher(None, list(pattern), list(operators), autojunk=False)
    left: list[tuple[str, int]] = []
    right: list[tuple[str, str, int]] = []
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        mark = 0 if tag == "equal" else _DIFFERS
        for k in range(max(i2 - i1, j2 - j1)):
            name = names[j1 + k] if j1 + k < j2 else ""
            # What differs may be a value that the pattern reads, of which it has no operation.
            absent = "(an operand)" if name == entry.place and name not in entry.nodes else ""
            left.append((pattern[i1 + k], mark) if i1 + k < i2 else (absent, _EMPTY))
            if j1 + k < j2:
                right.append((operators[j1 + k], name, _DIFFERS if name == entry.place else mark))
            else:
                right.append(("", "", _ABSENT))
    return {"title": f"{rule.kind} ({rule.name})", "pattern": left, "graph": right}
