"""The passes, rule sets and backends that a plan names, constructed from their names and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.nn import Parameter

from dovetail.errors import InvalidArgument
from dovetail.ir.graph_module import attribute
from dovetail.ir.meta_keys import DERIVED
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
from dovetail.runtime.presets import GradientGuard, Mode
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


class PlannedPasses:
    """The passes of a decision, run one by one so that calls that record gradients lose none.

    A pass that computes constants from weights runs as one that does not, or is left out, where calls may record gradients
    of such a weight: in training, and in inference while gradients are enabled. The default passes never do that.
    """

    def __init__(self, label: str, mode: Mode) -> None:
        self.problems: list[str] = []
        self._label, self._trains = label, mode == "training"
        self._detached: dict[str, None] = {}
        self._attached: dict[str, None] = {}

    def run(self, choice: PassChoice, gm: GraphModule) -> GraphModule:
        """Return the graph after a pass, or after what takes its place."""
        result = make_pass(choice)(gm)
        weights = _materialised_weights(gm, result)
        trained = [name for name, weight in weights.items() if weight.requires_grad]
        if not trained or not (self._trains or torch.is_grad_enabled()):
            self._detached.update(dict.fromkeys(weights))
            return result
        self._attached.update(dict.fromkeys(trained))
        other = _gradient_preserving(choice)
        self.problems.append(self._problem(choice, other, trained))
        return gm if other is None else make_pass(other)(gm)

    @property
    def guard(self) -> GradientGuard:
        # In training the passes are the same for all calls.
        return GradientGuard(tuple(self._detached), () if self._trains else tuple(self._attached))

    def _problem(self, choice: PassChoice, other: PassChoice | None, trained: Sequence[str]) -> str:
        more = f" and {len(trained) - 1} more" if len(trained) > 1 else ""
        instead = "it is left out" if other is None else "weights are converted in every call"
        advice = "" if self._trains else ". For inference compile and call the model under torch.no_grad()"
        return (
            f"the pass {choice.name} of '{self._label}': no gradient would reach '{trained[0]}'{more}, so that "
            f"{instead}{advice}"
        )


def _gradient_preserving(choice: PassChoice) -> PassChoice | None:
    """Return the form of a pass that computes from weights in every call, as training needs it; None if it has none."""
    if choice.name not in ("MergeParallel", "ChannelsLast"):
        return None
    return replace(choice, options={**choice.options, "materialise": False})


def _materialised_weights(before: GraphModule, after: GraphModule) -> dict[str, Tensor]:
    """Return the weights, by name, that a pass has computed constants from: no gradient reaches them through these."""
    earlier = before.meta.get(DERIVED, ())
    new = [derivation for derivation in after.meta.get(DERIVED, ()) if derivation not in earlier]
    sources = {name: attribute(after, name) for each in new for name in each.sources if name is not None}
    return {name: held for name, held in sources.items() if isinstance(held, Parameter) or held.requires_grad}


def make_backend(choice: BackendChoice, given: Mapping[str, Backend] | None = None) -> Backend:
    """Return the backend that a plan names, constructed with its options; without any that of the caller, if given."""
    if not choice.options and given is not None and choice.name in given:
        return given[choice.name]
    return backend_with_options(choice.name, choice.options)
