"""Rules that propose what belongs together: patterns, groups, siblings, capabilities, modules, repeats.

`DEFAULT` is every rule of the library and, for what they leave, `groups()`.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from dovetail.rules.by_module import modules
from dovetail.rules.horizontal import siblings
from dovetail.rules.partition import capability
from dovetail.rules.repeated_blocks.repeats_rule import repeats
from dovetail.rules.vertical import groups

if _TYPE_CHECKING:
    from dovetail.rules import library
    from dovetail.rules.rule import RuleSet as _RuleSet

    DEFAULT: _RuleSet

__all__ = ["DEFAULT", "capability", "groups", "library", "modules", "repeats", "siblings"]


def __getattr__(name: str) -> _Any:
    # The library takes a while to build and is imported on first use.
    if name == "library":
        from importlib import import_module

        return import_module("dovetail.rules.library")
    if name == "DEFAULT":
        from dovetail.rules.library import ALL
        from dovetail.rules.rule import RuleSet

        # Groups do not take in well-known regions, so that their kinds stay visible.
        value = globals()[name] = RuleSet(ALL, groups(grows=False))
        return value
    raise AttributeError(f"module 'dovetail.rules' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
