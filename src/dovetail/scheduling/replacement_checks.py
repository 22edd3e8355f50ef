"""Replacements of regions: their arguments bound to operands, their calls, and checks of them on recorded operands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.ir.effects import DeclaredEffects
from dovetail.ir.graph_module import copy_graph, rebuild
from dovetail.ir.meta_keys import REGION
from dovetail.ir.process_state import get_rng_state, set_rng_state
from dovetail.numerics.compare import bitwise_equal, describe_tensor, tensor_mismatch
from dovetail.outlining.region import Region
from dovetail.rules.patterns.match_state import Value
from dovetail.rules.patterns.pattern_rule import PatternRule
from dovetail.scheduling.call_recording import ModelInputs, copy_tensors, isolated_run, training_mode
from dovetail.scheduling.finders import ByRegion, ByRule, PartMatch

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
Operand = tuple[int, int]
"""The index of a match among those that are replaced, and of an operand among its own."""
ABSENT: Operand = (-1, -1)
"""An optional operand of a pattern that a match does not have."""


@dataclass(frozen=True, eq=False)
class Replacement:
    """What is called in place of matches, and its arguments.

    `positional` are the operands it takes by position, `named` by keyword; `literals` are captured ones it takes by
    keyword, `params` its own parameters that operands replace, `fixed` further arguments. `results` maps each result
    of the matches to one of its own. `arity` and `outputs` are the numbers of operands and results of each match: it
    replaces only matches with the same.
    """

    new: Callable[..., Any]
    name: str
    positional: tuple[Operand, ...]
    results: tuple[int, ...]
    arity: tuple[int, ...]
    outputs: tuple[int, ...]
    named: Mapping[str, Operand] = field(default_factory=dict[str, Operand])
    literals: tuple[str, ...] = ()
    params: Mapping[str, Operand] = field(default_factory=dict[str, Operand])
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    declared_effects: DeclaredEffects | None = None

    def adapter(self, matches: Sequence[PartMatch], region: Region) -> Adapter:
        """Return a module with the operands and results of a region."""
        arity = tuple(len(match.operands) for match in matches)
        if arity != self.arity:
            raise ScheduleError(
                f"'{self.name}' replaces operations that read {_counted(self.arity)} values, and here they read "
                f"{_counted(arity)}"
            )
        outputs = tuple(len(match.outputs) for match in matches)
        if outputs != self.outputs:
            raise ScheduleError(
                f"'{self.name}' replaces operations of which {_counted(self.outputs)} results are used, and here "
                f"{_counted(outputs)} are"
            )
        inputs = {node.name: i for i, node in enumerate(region.inputs)}

        def number(operand: Operand) -> int | None:
            match, which = operand
            value = None if operand == ABSENT else list(matches[match].operands.values())[which]
            if value is None:
                return None
            name = value.name
            if name not in inputs:
                raise ScheduleError(
                    f"'{name}' is not an operand of what is replaced; the operands are {', '.join(inputs) or 'none'}"
                )
            return inputs[name]

        return Adapter(
            self.new,
            tuple(number(operand) for operand in self.positional),
            tuple(self.results[i] for i in result_order(region)),
            {**{name: matches[0].literals[name] for name in self.literals}, **self.fixed},
            {name: number(operand) for name, operand in self.params.items()},
            {name: number(operand) for name, operand in self.named.items()},
            self.declared_effects,
        )


def _counted(arity: Sequence[int]) -> str:
    return " and ".join(map(str, arity))


def own_state(new: Any, bound: Mapping[str, Any]) -> list[str]:
    """Return the parameters and buffers of a module that no operand replaces."""
    if not isinstance(new, nn.Module):
        return []
    names = [*dict(new.named_parameters()), *dict(new.named_buffers())]
    return [name for name in names if name not in bound]


def result_order(region: Region) -> tuple[int, ...]:
    """Return which result of the matches each result of the body is."""
    if not region.results:
        return tuple(range(len(region.outputs)))
    if any(number is None for number in region.results):
        lost = [o.name for o, number in zip(region.outputs, region.results, strict=False) if number is None]
        raise ScheduleError(
            f"inner values of what is replaced are used outside of it: {', '.join(lost)}. "
            f"A replacement does not return them; match less, or more"
        )
    # Unused results of the kind are not among those of the matches.
    numbers = cast("tuple[int, ...]", region.results)
    rank = {number: i for i, number in enumerate(sorted(numbers))}
    return tuple(rank[number] for number in numbers)


def flat_leaves(value: Any) -> list[Any]:
    """Return the leaves of a result in order, without None."""
    return [leaf for leaf in pytree.tree_leaves(value) if leaf is not None]


def label_of(new: Any) -> str:
    """Return the name of a replacement in messages."""
    return type(new).__name__ if isinstance(new, nn.Module) else getattr(new, "__name__", type(new).__name__)


class Adapter(nn.Module):
    """Calls a replacement with the calling convention of a body."""

    def __init__(
        self,
        new: Callable[..., Any],
        order: tuple[int | None, ...],
        results: tuple[int, ...],
        fixed: dict[str, Any],
        params: dict[str, int | None],
        named: dict[str, int | None],
        declared_effects: DeclaredEffects | None,
    ) -> None:
        super().__init__()
        self.new, self.declared_effects = new, declared_effects
        self.order, self.results, self.fixed, self.params, self.named = order, results, fixed, params, named

    def _get_name(self) -> str:
        return label_of(self.new)

    def call(self, operands: Sequence[Any]) -> Any:
        """Return the result of the replacement for the operands of the body."""
        args = tuple(None if i is None else operands[i] for i in self.order)
        named = {name: None if i is None else operands[i] for name, i in self.named.items()}
        kwargs = {**self.fixed, **named}
        if not self.params:
            return self.new(*args, **kwargs)
        own = {name: operands[i] for name, i in self.params.items() if i is not None}
        return torch.func.functional_call(cast("nn.Module", self.new), own, args, kwargs)

    def forward(self, *operands: Any) -> tuple[Any, ...]:
        result = self.call(operands)
        flat = [result] if isinstance(result, Tensor) else flat_leaves(result)
        return tuple(flat[i] for i in self.results)


class Probe(nn.Module):
    """Runs a body and records its operands, its results and the random state before."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["body"] = body
        self.calls: list[tuple[tuple[Any, ...], tuple[Any, ...], Any]] = []

    def forward(self, *operands: Any) -> tuple[Any, ...]:
        inputs, start = copy_tensors(operands), get_rng_state()
        results = tuple(self.__dict__["body"](*operands))
        self.calls.append((inputs, copy_tensors(results), start))
        return results


def bind_replacement(
    new: Callable[..., Any],
    label: str,
    matches: Sequence[PartMatch],
    params: Mapping[str, Any] | None,
    fixed: Mapping[str, Any],
    results: tuple[int, ...],
) -> Replacement:
    """Bind the operands of matches to a replacement: by the names of a pattern's arguments, else by position."""
    bound_params = {name: operand_of(matches, value) for name, value in (params or {}).items()}
    _require_parameters(new, bound_params)
    arguments = _arguments(matches, set(bound_params.values()))
    names = _parameter_names(new)
    is_pattern = len(matches) == 1 and _pattern_names(matches[0]) is not None
    positional: list[Operand] = []
    named: dict[str, Operand] = {}
    present = [name for name, operand in arguments.items() if operand != ABSENT]
    if is_pattern and present and all(name in names for name in present):
        named = {name: arguments[name] for name in arguments if name in names}
    else:
        only = {name for name, kind in names.items() if kind is inspect.Parameter.KEYWORD_ONLY}
        named = {name: operand for name, operand in arguments.items() if name in only}
        positional = [operand for name, operand in arguments.items() if name not in only]
        while positional and positional[-1] == ABSENT:
            positional.pop()
    free = names.keys() - named.keys() - fixed.keys() - set(list(names)[: len(positional)])
    literals = tuple(name for name in matches[0].literals if name in free) if is_pattern else ()
    arity = tuple(len(match.operands) for match in matches)
    outputs = tuple(len(match.outputs) for match in matches)
    return Replacement(
        new, label, tuple(positional), results, arity, outputs, named, literals, bound_params, dict(fixed)
    )


def _parameter_names(new: Any) -> dict[str, Any]:
    signature = signature_of(new)
    parameters = signature.parameters.values() if signature is not None else ()
    return {p.name: p.kind for p in parameters if p.kind in _NAMED}


def _require_parameters(new: Any, bound_params: Mapping[str, Operand]) -> None:
    if not bound_params:
        return
    if not isinstance(new, nn.Module):
        raise InvalidArgument(
            "params are parameters of a new module; a function is called with the values themselves."
        )
    state = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    for name in bound_params:
        if name not in state:
            raise ScheduleError(
                f"the new module has no parameter '{name}'; there are {', '.join(state) or 'none'}"
            )


def _pattern_names(match: PartMatch) -> list[str] | None:
    """Return the arguments of the pattern of a match, in order; None without a pattern."""
    if isinstance(match.finder, ByRule) and match.request is not None:
        for rule in match.finder.rules:
            if isinstance(rule, PatternRule) and rule.name == match.request.rule:
                return list(rule.parameters.operands)
    if match.request is not None and match.request.arguments:
        return list(match.request.arguments)
    if isinstance(match.finder, ByRegion) and not match.operands.keys() <= {
        value.name for value in match.operands.values() if value is not None
    }:
        return list(match.operands)
    return None


def _arguments(matches: Sequence[PartMatch], bound: set[Operand]) -> dict[str, Operand]:
    """Return the operands to call with: a pattern's in its order, otherwise each value except weights, once."""
    if len(matches) == 1 and (pattern := _pattern_names(matches[0])) is not None:
        numbers = {name: i for i, name in enumerate(matches[0].operands)}
        names = [name for name in pattern if name not in matches[0].literals]
        named = {name: (0, numbers[name]) if name in numbers else ABSENT for name in names}
        return {name: operand for name, operand in named.items() if operand not in bound}
    arguments: dict[str, Operand] = {}
    for i, match in enumerate(matches):
        for j, value in enumerate(match.operands.values()):
            is_weight = value is None or (value.node.op == "get_attr" and isinstance(value.value, Tensor))
            if value is not None and not is_weight and (i, j) not in bound:
                arguments.setdefault(value.name, (i, j))
    return arguments


def operand_of(matches: Sequence[PartMatch], value: Any) -> Operand:
    """Return the operand of matches that is a value of one, or has a name; `1.w` is `w` of the second."""
    if isinstance(value, Value):
        for i, match in enumerate(matches):
            for j, operand in enumerate(match.operands.values()):
                if operand is not None and operand.name == value.name:
                    return i, j
    elif isinstance(value, str):
        first, _, rest = value.partition(".")
        places = (
            [int(first)] if rest and first.isdigit() and int(first) < len(matches) else range(len(matches))
        )
        name = rest if isinstance(places, list) else value
        for i in places:
            for j, (key, operand) in enumerate(matches[i].operands.items()):
                if name == key or (operand is not None and operand.name == name):
                    return i, j
        operands = dict.fromkeys(key for match in matches for key in match.operands)
        raise ScheduleError(
            f"'{value}' is not an operand of what is replaced; the operands are {', '.join(operands) or 'none'}"
        )
    raise InvalidArgument(f"params takes values of the match, such as match['w'], not {value!r}.")


def operand_name(matches: Sequence[PartMatch], operand: Operand) -> str:
    """Return the name of an operand in the history."""
    match, which = operand
    name = list(matches[match].operands)[which]
    return name if len(matches) == 1 else f"{match}.{name}"


@dataclass(frozen=True)
class ProbedModule:
    """One run of a traced part: what the operations of a match computed, and what each call of its module returned."""

    computed: Sequence[Any]
    returned: Sequence[Sequence[Any]]


@dataclass(frozen=True)
class ResultBinding:
    """Which of the `count` values that a module returns each result of its operations is.

    `is_unique` unless other values, or another call of the module, agree with the results too.
    """

    results: tuple[int, ...]
    count: int
    is_unique: bool


def bind_results(
    matches: Sequence[PartMatch], runs: Sequence[ProbedModule], region_results: Sequence[int]
) -> ResultBinding:
    """Compare the results of operations with what a module returned in all runs, by their bits if these agree.

    Results are in the order of computation, and a module may return them in any order.
    """
    positions = sorted(range(len(region_results)), key=lambda i: region_results[i])
    for equal in (_same_bits, _equal):
        bindings: list[ResultBinding] = []
        for calls in zip(*(run.returned for run in runs), strict=False):
            count = min(len(values) for values in calls)
            candidates = [
                [
                    i
                    for i in range(count)
                    if all(equal(v[i], r.computed[at]) for v, r in zip(calls, runs, strict=True))
                ]
                for at in positions
            ]
            order = _distinct(candidates)
            if order is not None:
                bindings.append(ResultBinding(order, count, all(len(each) == 1 for each in candidates)))
        if bindings:
            return replace(bindings[0], is_unique=all(b == bindings[0] and b.is_unique for b in bindings))
    names = ", ".join(node.name for match in matches for node in match.outputs)
    raise ScheduleError(
        f"not all of {names} are returned by '{matches[0].module_path}', so that a replacement would not return them"
    )


def _distinct(candidates: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Return the first candidate of each that no earlier one has."""
    order: list[int] = []
    for each in candidates:
        free = next((i for i in each if i not in order), None)
        if free is None:
            return None
        order.append(free)
    return tuple(order)


def _same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return _equal(a, b)
    return bitwise_equal(a, b)


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or (type(a) is type(b) and a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True))
        if a.is_floating_point()
        else torch.equal(a, b)
    )


def with_call(gm: GraphModule, region: Region, module: nn.Module, name: str) -> GraphModule:
    """Return the graph with a call of a module in place of the call of a region."""
    target = _free_name(gm, name)
    graph = copy_graph(gm.graph)
    shared = False
    for node in graph.nodes:
        if node.name == region.node.name:
            node.target = target
            node.meta = {k: v for k, v in node.meta.items() if k != REGION}
        elif node.op == "call_module" and node.target == region.node.target:
            shared = True
    drop = frozenset() if shared else frozenset({str(region.node.target)})
    return rebuild(gm, graph, add={target: module}, drop=drop)


def _free_name(gm: GraphModule, base: str) -> str:
    used = {*gm._modules, *gm._parameters, *gm._buffers, *(n.name for n in gm.graph.nodes)}
    count = 0
    while (name := f"{base}_{count}") in used or hasattr(gm, name):
        count += 1
    return name


def run_probe(gm: GraphModule, region: Region, example: ModelInputs, owner: nn.Module) -> Probe:
    """Run a recorded call of a part with a probe in place of a region."""
    probe = Probe(region.body)
    run = with_call(gm, region, probe, "probe")
    # The graph holds the buffers of modules that replaced those of the owner.
    with isolated_run(owner), isolated_run(run), torch.no_grad():
        example.copied().call(run)
    return probe


def check_fits(
    adapter: Adapter, probe: Probe, name: str, count: int, *, values: bool, may_write: bool
) -> DeclaredEffects:
    """Raise unless a replacement accepts the operands of a region and returns `count` results like those of the region.

    Shapes and dtypes are compared, and with `values` the numbers, random ones included. Return the observed effects.
    """
    check_signature(adapter.new, len(adapter.order), {**adapter.fixed, **adapter.named}, name)
    operands, expected, start = probe.calls[0]
    try:
        results, effects = _run_replacement(adapter, operands, start)
    except Exception as error:
        raise ScheduleError(
            f"'{name}' does not accept its operands ({_describe_operands(operands, adapter.order)}): "
            f"{type(error).__name__}: {error}"
        ) from error
    if len(results) != count:
        raise ScheduleError(f"'{name}' returns {len(results)} values, and what it replaces returns {count}")
    check_results([results[i] for i in adapter.results], expected, name, adapter.results, values=values)
    if effects.writes and not may_write:
        raise ScheduleError(
            f"'{name}' writes to its operands, which what it replaces does not, and others may read them. "
            f"Let it work on a copy"
        )
    return effects if not isinstance(adapter.new, nn.Module) else _in_either_mode(adapter, probe, effects)


def check_order(adapter: Adapter, probe: Probe) -> None:
    """Raise if a module computes something else than its own operations when called with the operands in this order.

    A graph does not record which operand was which argument; they are ordered by where they are first read.
    """
    if len(adapter.order) < 2:
        return
    operands, expected, start = probe.calls[0]
    try:
        results, _ = _run_replacement(adapter, operands, start)
        check_results([results[i] for i in adapter.results], expected, "it", adapter.results, values=True)
    except ScheduleError as error:
        raise ScheduleError(
            f"which operand is which argument of the module is not known from the graph: called with them in the order "
            f"in which they are first read, it computes something else ({error}). Replace it before anything around it is "
            f"traced"
        ) from error
    except Exception:  # it does not run on these operands; the replacement is checked next
        return


def _run_replacement(
    adapter: Adapter, operands: Sequence[Any], start: Mapping[str, Tensor]
) -> tuple[list[Any], DeclaredEffects]:
    """Run a replacement and return its results and its effects on operands, state and random numbers."""
    inputs = list(copy_tensors(operands))
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    state = [*adapter.parameters(), *adapter.buffers()]
    with isolated_run(adapter), torch.no_grad():
        set_rng_state(start)
        before = [value._version for value in tensors], [value._version for value in state]
        results = flat_leaves(adapter.call(inputs))
        end = get_rng_state()
        is_random = not all(torch.equal(drawn, end[name]) for name, drawn in start.items())
        wrote = [value._version for value in tensors] != before[0]
        is_unchanged = [value._version for value in state] == before[1]
        is_unchanged = is_unchanged and all(
            a is b for a, b in zip(state, [*adapter.parameters(), *adapter.buffers()], strict=False)
        )
    places = {value.untyped_storage().data_ptr() for value in tensors if value.layout is torch.strided}
    dense = [value for value in results if isinstance(value, Tensor) and value.layout is torch.strided]
    shares = any(value.untyped_storage().data_ptr() in places for value in dense)
    return results, DeclaredEffects(wrote, shares, not is_unchanged, is_random)


def _in_either_mode(adapter: Adapter, probe: Probe, effects: DeclaredEffects) -> DeclaredEffects:
    """Return the effects of a module in train and eval mode together, as the mode of the model may change."""
    operands, _, start = probe.calls[0]
    try:
        with training_mode(adapter, not cast("nn.Module", adapter.new).training):
            _, other = _run_replacement(adapter, operands, start)
    except Exception:  # nothing is known of a mode in which it does not run on these operands
        other = DeclaredEffects(writes=True, shares=True, state=True, random=True)
    return DeclaredEffects(
        effects.writes or other.writes,
        effects.shares or other.shares,
        effects.state or other.state,
        effects.random or other.random,
    )


def check_results(
    results: Sequence[Any],
    expected: Sequence[Any],
    name: str,
    numbers: Sequence[int] | None = None,
    *,
    values: bool,
) -> None:
    """Raise unless results agree in number, shapes and dtypes, and with `values` in their numbers within rounding."""
    if len(results) != len(expected):
        raise ScheduleError(f"'{name}' returns {len(results)} values, not {len(expected)}")
    for i, has, needs in zip(numbers or range(len(results)), results, expected, strict=True):
        reason = tensor_mismatch(has, needs, values=values) if isinstance(needs, Tensor) else None
        if reason is not None:
            raise ScheduleError(f"result {i} of '{name}' {reason}")


def check_signature(new: Any, count: int, named: Mapping[str, Any], name: str) -> None:
    """Raise unless something can be called with so many positional and some named arguments."""
    signature = signature_of(new)
    if signature is None:
        return
    try:
        signature.bind(*[None] * count, **named)
    except TypeError as error:
        also = f" and {', '.join(named)}" if named else ""
        raise ScheduleError(
            f"'{name}' takes {signature}, and is given {count} values{also}: {error}. "
            f"`concrete_args` fixes further arguments"
        ) from None


def signature_of(new: Any) -> inspect.Signature | None:
    """Return the signature of a replacement; None if it has none that can be read."""
    if not callable(new):
        raise InvalidArgument(f"replace takes a module or a function, not a {type(new).__name__}.")
    try:
        return inspect.signature(new.forward if isinstance(new, nn.Module) else new)
    except (TypeError, ValueError):
        return None


@contextmanager
def in_mode(new: Any, training: bool) -> Generator[None]:
    """Put a new module into the mode of what it replaces; its own is restored if it does not fit.

    Where it is in that mode already, submodules keep theirs, such as frozen norms in eval mode.
    """
    if not isinstance(new, nn.Module):
        yield
        return
    modes = [(module, module.training) for module in new.modules()]
    if new.training != training:
        new.train(training)
    try:
        yield
    except BaseException:
        for module, mode in modes:
            module.training = mode
        raise


def _describe_operands(operands: Sequence[Any], order: Sequence[int | None]) -> str:
    values = [None if i is None else operands[i] for i in order]
    return ", ".join(describe_tensor(v) if isinstance(v, Tensor) else repr(v) for v in values)
