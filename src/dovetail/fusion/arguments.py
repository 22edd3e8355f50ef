"""What users may give to `fuse`: bad arguments are refused before anything is looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from dovetail.errors import InvalidArgument, RuleError, did_you_mean
from dovetail.fusion.cost import CostModel, Traffic
from dovetail.rules.limits import UNLIMITED, Limits
from dovetail.rules.rule import RuleSet, as_rules


def require_rules(rules: Any) -> RuleSet:
    if rules is None:
        # The library traces its patterns when it is first asked for.
        from dovetail.rules import DEFAULT

        rules = DEFAULT
    chosen = as_rules(rules)
    for rule in chosen:
        for name, kind in (("name", str), ("kind", str), ("priority", int)):
            if not isinstance(getattr(rule, name, None), kind):
                label = str(getattr(rule, "name", type(rule).__name__))
                raise RuleError(label, f"its {name} is not a {kind.__name__}")
    return chosen


def require_count(name: str, value: Any, least: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgument(f"{name}={value!r} is neither None nor an int of {least} or more.")
    return value


def require_on_error(on_error: Any) -> Literal["fallback", "raise"]:
    if on_error not in ("fallback", "raise"):
        raise InvalidArgument(f"on_error {on_error!r}; give 'fallback' or 'raise'.")
    return on_error


def require_limits(limits: Any) -> Limits:
    if limits is None:
        return UNLIMITED
    if not isinstance(limits, Limits):
        raise InvalidArgument(f"limits is a {type(limits).__name__}; give a Limits.")
    return limits


def require_cost(cost: Any) -> CostModel:
    if cost is None:
        return Traffic()
    methods: list[Callable[..., Any] | None] = [getattr(cost, n, None) for n in ("gain", "freed")]
    if isinstance(cost, type) or not all(callable(m) for m in methods):
        raise InvalidArgument(f"cost {cost!r} is not a cost model: it needs methods `gain` and `freed`.")
    return cost


def require_priorities(priorities: Any, rules: RuleSet) -> Mapping[str, int]:
    if priorities is None:
        return {}
    if not isinstance(priorities, Mapping):
        raise InvalidArgument(
            f"priorities is a {type(priorities).__name__}; give a mapping from rule or kind."
        )
    known = dict.fromkeys([*(r.name for r in rules), *(r.kind for r in rules)])
    given = cast("Mapping[Any, Any]", priorities)
    for key, value in given.items():
        if key not in known:
            there = f"There are {', '.join(list(known)[:8])}."
            raise InvalidArgument(
                f"priorities: no rule or kind {key!r}. {did_you_mean(str(key), known, otherwise=there)}"
            )
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidArgument(f"priorities: {value!r} for '{key}' is not an int.")
    return dict(given)
