"""What `find` is given, as a finder."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from dovetail.errors import InvalidArgument
from dovetail.rules.pattern import PatternRule
from dovetail.rules.rule import Rule, RuleSet
from dovetail.scheduling.finders import ByModule, ByNode, ByRule, Finder

_NO_NAME = re.compile(r"\W+")


def finder_of(what: Any) -> Finder:
    """What `find` was given as a finder."""
    if isinstance(what, Finder):
        return what
    if isinstance(what, Rule):
        return ByRule((what,))
    if isinstance(what, RuleSet) and len(what):
        return ByRule(what.rules)
    if isinstance(what, (OpOverload, OpOverloadPacket)):
        return ByNode(what)
    if isinstance(what, type) and issubclass(what, nn.Module):
        return ByModule(what)
    if isinstance(what, (str, re.Pattern)):
        return ByModule(_expression(what))
    if isinstance(what, nn.Module):
        raise InvalidArgument(
            f"find takes a class of modules or a path, not a {type(what).__name__} itself: find({type(what).__name__})."
        )
    if callable(what) and not _has_signature(what):
        raise InvalidArgument(
            f"find cannot tell what {getattr(what, '__name__', repr(what))} takes; write a function that calls it, or give "
            f"the operator of torch.ops."
        )
    if callable(what):
        return (
            ByNode(what) if _is_predicate(what) else ByRule((PatternRule(what, kind=_function_kind(what)),))
        )
    raise InvalidArgument(
        f"find takes a pattern function or rule, a module class, a regular expression on module paths, a predicate "
        f"on nodes or an operator, not {what!r}."
    )


def _expression(text: Any) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise InvalidArgument(f"{text!r} is not a regular expression on module paths: {error}.") from error


def _has_signature(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        return False
    return True


def _is_predicate(function: Callable[..., Any]) -> bool:
    """Whether a function looks at one node: its argument is called `node`, or annotated as one."""
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 1:
        return False
    only = parameters[0]
    return only.name == "node" or only.annotation in (Node, "Node", "fx.Node", "torch.fx.Node")


def _function_kind(function: Callable[..., Any]) -> str:
    kind = _NO_NAME.sub("_", getattr(function, "__name__", "pattern")).strip("_")
    return kind if kind and not kind[0].isdigit() else "pattern"
