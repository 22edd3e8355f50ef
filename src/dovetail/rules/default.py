"""The rules that are used when none are named."""

from dovetail.rules.groups import groups
from dovetail.rules.library import ALL
from dovetail.rules.rule import RuleSet

# What a kind is known by stays in sight: groups do not take well-known regions in.
DEFAULT = RuleSet(ALL, groups(grows=False))
