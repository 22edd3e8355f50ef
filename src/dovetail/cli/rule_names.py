"""Rules by name: the sets that plans name too, sets and rules of the library, and rules in a file or package."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.cli.model_source import import_attribute, is_attribute
from dovetail.errors import InvalidArgument, did_you_mean
from dovetail.rules.rule import Rule, RuleSet
from dovetail.tuning.plan_passes import rule_set, rule_set_names


def known_rules() -> tuple[str, ...]:
    """Return the names that `named_rules` takes, besides those in a file or package."""
    return tuple(dict.fromkeys((*rule_set_names(), *_library_sets(), *(rule.name for rule in _library()))))


def named_rules(names: Sequence[str] | None) -> RuleSet | None:
    """Return the rules of some names, each of which may be several with commas between; None for no names."""
    each = [name.strip() for text in names or () for name in text.split(",")]
    return RuleSet(*map(_named, each)) if each else None


def _named(name: str) -> Rule | RuleSet:
    if name in rule_set_names():
        return rule_set(name)
    sets = _library_sets()
    if name in sets:
        return sets[name]
    rules = {rule.name: rule for rule in _library()}
    if name in rules:
        return rules[name]
    if is_attribute(name):
        value = import_attribute(name)
        if isinstance(value, (Rule, RuleSet)):
            return value
        raise InvalidArgument(f"'{name}' is a {type(value).__name__}, neither a rule nor a RuleSet.")
    hint = did_you_mean(name, known_rules(), otherwise=f"There are {', '.join((*rule_set_names(), *sets))}.")
    raise InvalidArgument(f"there are no rules '{name}'. {hint}")


def _library() -> RuleSet:
    from dovetail.rules.library import ALL

    return ALL


def _library_sets() -> dict[str, RuleSet]:
    """Return the sets of the library by their names in lower case."""
    from dovetail.rules import library

    values = {name.lower(): getattr(library, name) for name in library.__all__ if name != "ALL"}
    return {name: value for name, value in values.items() if isinstance(value, RuleSet)}
