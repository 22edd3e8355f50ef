"""The passes, rule sets and backends that a plan names, constructed from their names and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from dovetail.errors import InvalidArgument
from dovetail.lowering.backend_protocol import Backend, backend_with_options
from dovetail.passes.channels_last import ChannelsLast
from dovetail.passes.cleanup import Cleanup
from dovetail.passes.fold_constants import FoldConstants
from dovetail.passes.fold_conv_batch_norm import FoldConvBatchNorm
from dovetail.passes.merge_parallel.merge_parallel import MergeParallel
from dovetail.passes.merge_parallel.merge_plan import Branch
from dovetail.passes.pass_manager import Pass
from dovetail.passes.region_passes import Fuse
from dovetail.rules.horizontal import siblings
from dovetail.rules.repeated_blocks.repeats_rule import repeats
from dovetail.rules.rule import Decline, Rule, RuleSet
from dovetail.rules.vertical import groups
from dovetail.tuning.decisions import BackendChoice, PassChoice


@dataclass(frozen=True)
class MergeGroups:
    """A guard of MergeParallel that accepts groups of siblings with some signatures only."""

    signatures: tuple[str, ...]

    def __call__(self, branches: Iterable[Branch]) -> Decline | None:
        signature = group_signature(branches)
        return None if signature in self.signatures else Decline(f"the plan does not merge {signature}")


def group_signature(branches: Iterable[Branch]) -> str:
    """Return what distinguishes groups of sibling products: the operator and the widths, equal in equal layers."""
    siblings = list(branches)
    widths = ", ".join(str(branch.width) for branch in siblings)
    return f"{siblings[0].operator} {siblings[0].rows}x{siblings[0].depth} to [{widths}]"


def _merge_parallel(options: Mapping[str, Any]) -> Pass:
    groups = options.get("groups")
    others = {name: value for name, value in options.items() if name != "groups"}
    if groups is None:
        return MergeParallel(**others)
    if not isinstance(groups, (list, tuple)):
        raise InvalidArgument(f"groups {groups!r} of MergeParallel is not a list of signatures.")
    return MergeParallel(**others, guard=MergeGroups(tuple(map(str, cast("list[Any]", groups)))))


_RULES: Mapping[str, Callable[[], Rule | RuleSet]] = {
    "default": lambda: _rules().DEFAULT,
    "library": lambda: _rules().library.ALL,
    "groups": groups,
    "siblings": siblings,
    "repeats": repeats,
}
"""The rule sets that a plan may name. Those of the library are built when they are first needed."""


def _rules() -> Any:
    from dovetail import rules

    return rules


def rule_set_names() -> tuple[str, ...]:
    """Return the names of the rule sets that a plan may name."""
    return tuple(_RULES)


def rule_set(name: Any) -> Rule | RuleSet:
    """Return the rules that a plan names; raise InvalidArgument if there are none of that name."""
    if not isinstance(name, str) or name not in _RULES:
        raise InvalidArgument(f"it names the rules {name!r}; there are {', '.join(_RULES)}.")
    return _RULES[name]()


def _fuse(options: Mapping[str, Any]) -> Pass:
    others = {option: value for option, value in options.items() if option != "rules"}
    return Fuse(rule_set(options.get("rules", "default")), **others)


_PASSES: Mapping[str, Callable[[Mapping[str, Any]], Pass]] = {
    "MergeParallel": _merge_parallel,
    "FoldConvBatchNorm": lambda options: FoldConvBatchNorm(**options),
    "FoldConstants": lambda options: FoldConstants(**options),
    "Cleanup": lambda options: Cleanup(**options),
    "ChannelsLast": lambda options: ChannelsLast(**options),
    "Fuse": _fuse,
}


def make_pass(choice: PassChoice) -> Pass:
    """Return the pass that a plan names; raise InvalidArgument for one that does not exist, or options it has not."""
    construct = _PASSES.get(choice.name)
    if construct is None:
        raise InvalidArgument(f"it names the pass '{choice.name}'; there are {', '.join(_PASSES)}.")
    return construct(choice.options)


def make_backend(choice: BackendChoice, given: Mapping[str, Backend] | None = None) -> Backend:
    """Return the backend that a plan names, constructed with its options; without any that of the caller, if given."""
    if not choice.options and given is not None and choice.name in given:
        return given[choice.name]
    return backend_with_options(choice.name, choice.options)
