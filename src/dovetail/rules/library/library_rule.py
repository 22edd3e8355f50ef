"""Kinds as contracts, the rules that match them, and the guards and sub-patterns that these rules share.

A `Kind` is defined by its reference, a torch function of exactly the arguments and attributes of its regions. A
`LibraryRule` for it is traced on first use, and only for a graph that has the operators it cannot match without.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dovetail.errors import InvalidArgument, RuleError
from dovetail.ir.nodes import is_projection
from dovetail.ir.schema import op_name, static_size
from dovetail.outlining.region import make_identity
from dovetail.rules.patterns.alternatives import Const, either
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.patterns.normalized_graph import normalized_graph_of
from dovetail.rules.patterns.pattern_rule import Guard, PatternRule
from dovetail.rules.rule import Candidate, Decline, Proposal, RuleContext

_MAX_DISTANCE = 8

# A near-miss that shares fewer operations with the pattern is a coincidence, and so is one that shares only these.
_MIN_NEAR_MISS = 3
_COMMON_OPS = frozenset({"add", "sub", "mul", "div", "neg", "slice", "cat"})
Required = inspect.Parameter.empty
"""The default of an attribute that has none."""


@dataclass(frozen=True, eq=False)
class Kind:
    """The contract of a kind: `reference(**arguments, **attrs)` computes the results of every region of it.

    Parameters of the reference that are not keyword-only are the arguments, None where an optional one is absent;
    keyword-only ones are the attributes, all of which every region has. `draws` states the order of random draws;
    `rounds_to` names the argument to whose dtype the reference rounds values it computed in float32.
    """

    name: str
    version: int
    reference: Callable[..., Any]
    draws: str = ""
    rounds_to: str = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)

    @cached_property
    def arguments(self) -> Mapping[str, inspect.Parameter]:
        """The arguments by name; those with a default may be absent."""
        return self._parameters(keyword_only=False)

    @cached_property
    def attrs(self) -> Mapping[str, inspect.Parameter]:
        """The attributes by name, each with its type and perhaps a default."""
        return self._parameters(keyword_only=True)

    def _parameters(self, *, keyword_only: bool) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self.reference).parameters
        return {name: p for name, p in parameters.items() if (p.kind is p.KEYWORD_ONLY) == keyword_only}

    def is_default(self, name: str, value: Any) -> bool:
        """Return whether an attribute has the default value of the reference's parameter."""
        parameter = self.attrs.get(name)
        return parameter is not None and parameter.default is not Required and parameter.default == value

    def complete(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes with defaults filled in; raise KeyError naming one that is unknown or missing."""
        for name in attrs:
            if name not in self.attrs:
                raise KeyError(f"kind '{self.name}' has no attribute '{name}'")
        completed = {name: attrs.get(name, p.default) for name, p in self.attrs.items()}
        for name, value in completed.items():
            if value is Required:
                raise KeyError(f"kind '{self.name}' needs the attribute '{name}'")
        return completed

    def describes(self, version: int, arguments: Iterable[str], attrs: Iterable[str]) -> bool:
        """Return whether the contract covers a region of this version with these arguments and attributes."""
        if version != self.version:
            return False
        return set(arguments) <= set(self.arguments) and set(attrs) == set(self.attrs)


def kind(
    name: str, *, version: int = 1, draws: str = "", rounds_to: str = ""
) -> Callable[[Callable[..., Any]], Kind]:
    """Return a decorator that makes a kind of its reference."""
    return lambda reference: Kind(name, version, reference, draws, rounds_to)


def inherit_parameters(base: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that replaces `*args` and `**attrs` in a signature by the parameters of `base`.

    `*args` stands for those that are not keyword-only, `**attrs` for those that are.
    """
    inherited = inspect.signature(base).parameters.values()

    def decorate(reference: Callable[..., Any]) -> Callable[..., Any]:
        parameters: list[inspect.Parameter] = []
        for p in inspect.signature(reference).parameters.values():
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                keyword_only = p.kind is p.VAR_KEYWORD
                parameters += [q for q in inherited if (q.kind is q.KEYWORD_ONLY) == keyword_only]
            else:
                parameters.append(p)
        cast("Any", reference).__signature__ = inspect.Signature(parameters)
        reference.__annotations__ = {**base.__annotations__, **reference.__annotations__}
        return reference

    return decorate


class LibraryRule(PatternRule):
    """A pattern rule for a kind, whose operands are arguments of the kind's reference.

    `needs` names operators without which there is no match, so that most graphs cost nothing: words separated by
    blanks, each one operator or alternatives separated by `|`; `when` is a further condition on the graph. A
    near-miss of one or two operations is not reported, nor one that reached none of these operators, common ones aside.
    The region's attributes are those that `attrs_of` returns, by default the literals of the pattern, and the kind's
    defaults. `results_of` returns the kind's results where they are not the pattern's, None for one not computed.
    `guards` are checked in their order, after `keeps_precision`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        kind: Kind,
        needs: str,
        attrs_of: Callable[[Match], Mapping[str, Any]] | None = None,
        results_of: Callable[[Match], Sequence[Node | None]] | None = None,
        when: Callable[[RuleContext], bool] | None = None,
        guards: Iterable[Guard] = (),
        **options: Any,
    ) -> None:
        super().__init__(function, kind=kind.name, version=kind.version, checked=False, **options)
        self.reference = kind
        self.needs = tuple(frozenset(word.split("|")) for word in needs.split())
        self.attrs_of, self.results_of, self.when = attrs_of, results_of, when
        self.guard(lambda match: keeps_precision(match, kind.rounds_to))
        for guard in guards:
            self.guard(guard)
        unknown = [name for name in self.parameters.operands if name not in kind.arguments]
        if unknown:
            raise RuleError(self.name, f"'{unknown[0]}' is not an argument of the kind '{kind.name}'")

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        """Return the proposals, searched for once per context: other rules may ask for them too."""
        return context.analysis(self._search)

    def _search(self, context: RuleContext) -> tuple[Proposal, ...]:
        names = context.analysis(_op_names)
        if names is not None and not all(word & names for word in self.needs):
            return ()
        if self.when is not None and not self.when(context):
            return ()
        return tuple(p for p in super().propose(context) if self._is_reportable(context, p))

    def _is_reportable(self, context: RuleContext, proposal: Proposal) -> bool:
        if isinstance(proposal, Candidate) or proposal.matched >= proposal.wanted:
            return True
        if proposal.matched < _MIN_NEAR_MISS:
            return False
        distinctive = [word for word in self.needs if not word <= _COMMON_OPS]
        reached = {n for i in proposal.members for n in context.analysis(_op_names_by_position)[i]}
        return not distinctive or any(word & reached for word in distinctive)

    def attributes(self, match: Match) -> dict[str, Any] | Decline:
        attrs = self.attrs_of(match) if self.attrs_of is not None else super().attributes(match)
        if isinstance(attrs, Decline):
            return attrs
        for name, value in attrs.items():
            try:
                make_identity(self.kind, self.version, {name: value})
            except InvalidArgument:
                return Decline(f"its '{name}' would be {value!r}, and attributes cannot hold that")
        return self.reference.complete(attrs)

    def results(self, match: Match) -> Sequence[Node | None]:
        return self.results_of(match) if self.results_of is not None else super().results(match)


def library_rule(
    kind: Kind, *, needs: str, attrs_of: Callable[[Match], Mapping[str, Any]] | None = None, **options: Any
) -> Callable[[Callable[..., Any]], LibraryRule]:
    """Return a decorator that makes a rule for a kind; options are those of `LibraryRule` and `dovetail.rule`."""
    return partial(LibraryRule, kind=kind, needs=needs, attrs_of=attrs_of, **options)


def _op_names_by_position(context: RuleContext) -> Mapping[int, Set[str]]:
    """Return the operators of the normalized graph that each position of the graph stands for."""
    names: dict[int, set[str]] = {i: set() for i in range(len(context.nodes))}
    for node, positions in context.analysis(normalized_graph_of).origins.items():
        for i in positions:
            names[i].add(op_name(node.target))
    return names


def _op_names(context: RuleContext) -> frozenset[str] | None:
    """Return the operators of the normalized graph, None where the graph cannot be normalized."""
    normalized = context.analysis(normalized_graph_of)
    return None if normalized.failure else frozenset(op_name(target) for target in normalized.by_target)


def keeps_precision(match: Match, rounds_to: str = "") -> Decline | None:
    """Refuse steps in a narrower dtype than the first floating operand has, and casts from float64 of any operand.

    A reference computes in the dtypes of the operands; it may round to that of the operand `rounds_to`.
    """
    values = [v for v in match.operands.values() if v is not None and _float_bits(v.value)]
    doubles = {v.aten: v for v in values if _float_bits(v.value) == _DOUBLE}
    narrow = match.operands.get(rounds_to) if not doubles else None
    for aten, node in match.aten.items():
        bits = _float_bits(aten.meta.get("val"))
        if narrow is not None and bits and aten.meta["val"].dtype == narrow.dtype:
            continue
        is_cast = op_name(aten.target) == "_to_copy"
        for value in (*values[:1], *(doubles[n] for n in aten.all_input_nodes if is_cast and n in doubles)):
            if 0 < bits < _float_bits(value.value):
                return Decline(f"'{value.name}' is rounded to {aten.meta['val'].dtype} on the way", at=node)
    return None


_DOUBLE = 64


def _float_bits(value: Any) -> int:
    """Return the width of a tensor's floating-point numbers, or of the parts of complex ones; 0 for anything else."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0
    return torch.finfo(value.dtype).bits


def is_floating_point(match: Match) -> Decline | None:
    """Refuse integers and complex numbers, which operators do not accept where their decompositions do."""
    for name in ("x", "gate", "empty", "table"):
        value = match.operands.get(name)
        if value is not None and not value.dtype.is_floating_point:
            return Decline(f"'{value.name}' is {value.dtype}, not a real floating-point value", at=value)
    return None


_REL_TOL = 1e-6
"""The relative tolerance of a rounded constant: a few float32 roundings, so that the reference is reproduced."""


def close_to(match: Match, name: str, expected: float) -> Decline | None:
    """Refuse a captured constant that differs from the expected one by more than rounding."""
    value = match.literals.get(name)
    if value is None or math.isclose(value, expected, rel_tol=_REL_TOL):
        return None
    return Decline(f"the constant is {value!r}, not {expected:.7g}")


def same_sizes(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether sizes have the same text: asking whether symbols are equal would add a guard."""
    return [str(n) for n in first] == [str(n) for n in second]


def shapes_differ(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether shapes that an elementwise operation or a product relates are known to differ.

    Symbols that differ are equal in every call that works, unless one size is 1.
    """
    if len(first) != len(second):
        return True
    pairs = ((static_size(a), static_size(b)) for a, b in zip(first, second, strict=True))
    return any(a != b if a is not None and b is not None else 1 in (a, b) for a, b in pairs)


def has_op(match: Match, *names: str) -> bool:
    """Return whether an operator of one of these names is among the operations matched."""
    return any(op_name(node.target) in names for node in match.aten)


def nodes_of(context: RuleContext, *names: str) -> list[Node]:
    """Return the nodes of the normalized graph that call an operator of one of these names."""
    return [n for n in context.analysis(normalized_graph_of).nodes if op_name(n.target) in names]


def results_by_position(match: Match) -> list[Node | None]:
    """Return the results of the one operator of a match that returns a tuple, by their position in it."""
    source = cast("Node", match.outputs[0].args[0])
    parts = {cast("int", user.args[1]): user for user in source.users if is_projection(user)}
    return [parts.get(i) for i in range(max(parts) + 1)]


def required_result(results: Sequence[Tensor | None], i: int) -> Tensor:
    """Return one result of an operator in a pattern; an alternative that needs one not computed does not apply."""
    result = results[i]
    if result is None:
        raise ValueError("this result is not computed")
    return result


def nearest_consumer(nodes: Collection[Node], names: Set[str], through: Set[str]) -> Node | None:
    """Return the nearest operator of one of these names that reads `nodes`, with a few of `through` in between."""
    inside = set(nodes)
    reached = [user for node in nodes for user in node.users if user not in inside]
    for _ in range(_MAX_DISTANCE):
        consumer = next((n for n in reached if op_name(n.target) in names), None)
        if consumer is not None:
            return consumer
        reached = [user for n in reached if op_name(n.target) in through for user in n.users]
    return None


def meta_tensor(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without data, as an example operand of a pattern."""
    return torch.empty(sizes, dtype=dtype, device="meta")


def bundle_arguments(
    name: str, bundle: Callable[..., Any], literals: Mapping[str, Any], operands: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a pattern that takes some of its arguments as one, `bundle(**arguments)`.

    To the rule each is an argument: the operands in the place of `name`, and last the literals, of which `literals`
    has an example each, with the default `Const(example)`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters: list[inspect.Parameter] = []
        own = inspect.signature(function)
        for p in own.parameters.values():
            each_operand = [p.replace(name=each, annotation="Tensor") for each in operands]
            parameters += each_operand if p.name == name else [p]
        for each, example in literals.items():
            parameters.append(inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=Const(example)))
        signature = own.replace(parameters=parameters)

        @functools.wraps(function)
        def pattern(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind_partial(*args, **kwargs).arguments
            bundled = bundle(**{each: arguments.pop(each, None) for each in (*operands, *literals)})
            return function(**{name: bundled}, **arguments)

        cast("Any", pattern).__signature__ = signature
        return pattern

    return decorate


Activation = Callable[[Tensor], Tensor]
_ACTIVATIONS: Mapping[str, Activation] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "squared_relu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardsigmoid": F.hardsigmoid,
    "selu": F.selu,
    "celu": F.celu,
    "log_sigmoid": F.logsigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}


def activate(x: Tensor, activation: str | None, slope: float | None = None) -> Tensor:
    """Apply the activation that an attribute of a kind names; None is the identity."""
    if activation is None:
        return x
    return (
        F.leaky_relu(x, cast("float", slope)) if activation == "leaky_relu" else _ACTIVATIONS[activation](x)
    )


def square(x: Tensor) -> Tensor:
    """x²."""
    return either(lambda: x.pow(2), lambda: x * x, lambda: x.square())


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return either(lambda: F.silu(x), lambda: x * torch.sigmoid(x))


def relu6(x: Tensor) -> Tensor:
    """min(max(x, 0), 6)."""
    return either(
        lambda: F.relu6(x),
        lambda: F.hardtanh(x, 0.0, 6.0),
        lambda: x.clamp(0, 6),
        lambda: x.clamp(min=0).clamp(max=6),
        lambda: torch.relu(x).clamp(max=6),
    )


SIMPLE_ACTIVATIONS: Mapping[str, tuple[str, Activation]] = {
    "relu6": ("relu6|hardtanh|clamp", relu6),
    "relu": ("relu", torch.relu),
    "silu": ("silu|sigmoid", silu),
    "tanh": ("tanh", torch.tanh),
    "sigmoid": ("sigmoid", torch.sigmoid),
    "hardswish": ("hardswish", F.hardswish),
    "elu": ("elu", F.elu),
    "mish": ("mish", F.mish),
}
"""Activations without constants: the operators, one of which each of them has, and the sub-pattern.

A match has the first of them whose operators it has.
"""


def _halved(x: Tensor, gate: Tensor) -> Tensor:
    """x * gate / 2."""
    return either(
        lambda: x * 0.5 * gate,
        lambda: x * (gate * 0.5),
        lambda: x * gate * 0.5,
        lambda: x / 2 * gate,
        lambda: x * gate / 2,
    )


def _erf_gelu(x: Tensor, root: Any, inverse: Any) -> Tensor:
    return _halved(x, either(lambda: torch.erf(x / root), lambda: torch.erf(x * inverse)) + 1.0)


def _tanh_gelu(x: Tensor, factor: Any, cubic: Any) -> Tensor:
    cube = either(lambda: x.pow(3), lambda: x * x * x, lambda: x * (x * x))
    inner = either(
        lambda: (x + cube * cubic) * factor,
        lambda: (x + x * cubic * x * x) * factor,
        lambda: x * factor * (1.0 + x * cubic * x),
        lambda: x * factor * (1.0 + x * x * cubic),
        lambda: x * (1.0 + x * x * cubic) * factor,
    )
    return _halved(x, torch.tanh(inner) + 1.0)


def _gelu(x: Tensor, *, root: Any, inverse: Any, factor: Any, cubic: Any, slope: Any) -> Tensor:
    return either(
        lambda: F.gelu(x),
        lambda: F.gelu(x, approximate="tanh"),
        lambda: _erf_gelu(x, root, inverse),
        lambda: _tanh_gelu(x, factor, cubic),
        lambda: x * torch.sigmoid(x * slope),
    )


_GELU_EXAMPLES = {"root": 1.4143, "inverse": 0.7072, "factor": 0.7979, "cubic": 0.0448, "slope": 1.7021}
_GELU_CONSTANTS = {
    "root": math.sqrt(2.0),
    "inverse": math.sqrt(0.5),
    "factor": math.sqrt(2.0 / math.pi),
    "cubic": 0.044715,
    "slope": 1.702,
}
with_gelu = bundle_arguments("gelu", partial(partial, _gelu), _GELU_EXAMPLES)
"""Gives a pattern the argument `gelu`: the exact GELU, its tanh approximation, or the quick one by a sigmoid.

A rule of such a pattern has the guard `is_gelu`.
"""
GELU_NAMES = {"none": "gelu", "tanh": "gelu_tanh", "sigmoid": "gelu_quick"}
"""The name of the activation for each approximation of a GELU."""


def is_gelu(match: Match) -> Decline | None:
    """Refuse constants that are not those of a GELU."""
    declines = (close_to(match, name, value) for name, value in _GELU_CONSTANTS.items())
    return next((decline for decline in declines if decline is not None), None)


def gelu_approximation(match: Match) -> str:
    """Return the `approximate` argument of the GELU in a match; "sigmoid" for x * sigmoid(1.702 * x)."""
    if has_op(match, "sigmoid"):
        return "sigmoid"
    is_tanh = has_op(match, "tanh") or any(n.kwargs.get("approximate") == "tanh" for n in match.aten)
    return "tanh" if is_tanh else "none"


def activation_name(match: Match) -> str | None:
    """Return the activation in a match that has at most one: a ReLU, a SiLU, or any GELU."""
    if has_op(match, "relu"):
        return "relu"
    if has_op(match, "silu") or (has_op(match, "sigmoid") and "slope" not in match.literals):
        return "silu"
    return GELU_NAMES[gelu_approximation(match)] if has_op(match, "gelu", "erf", "tanh", "sigmoid") else None


def combine_halves(x: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combine the two halves of the last dimension, from a chunk, a split or slices."""
    middle = x.shape[-1] // 2
    return either(
        lambda: combine(*x.chunk(2, dim=-1)),
        lambda: combine(*x.split([middle, middle], dim=-1)),
        lambda: combine(x[..., :middle], x[..., middle:]),
    )
