"""The rules that are used when none are named."""

from dovetail.rules.groups import groups
from dovetail.rules.library import ALL
from dovetail.rules.rule import RuleSet

DEFAULT = RuleSet(ALL, groups())
