"""Rules that propose what belongs together: patterns, groups, siblings, capabilities, modules, repeats.

`DEFAULT` is every rule of the library and, for what they leave, `groups()`.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from dovetail.rules.capability import capability
from dovetail.rules.groups import groups
from dovetail.rules.modules import modules
from dovetail.rules.repeats import repeats
from dovetail.rules.siblings import siblings

if _TYPE_CHECKING:
    from dovetail.rules import library
    from dovetail.rules.rule import RuleSet as _RuleSet

    DEFAULT: _RuleSet

__all__ = ["DEFAULT", "capability", "groups", "library", "modules", "repeats", "siblings"]


def __getattr__(name: str) -> _Any:
    # The library is only made when somebody asks for it.
    if name == "library":
        from importlib import import_module

        return import_module("dovetail.rules.library")
    if name == "DEFAULT":
        from dovetail.rules.default import DEFAULT

        return DEFAULT
    raise AttributeError(f"module 'dovetail.rules' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
