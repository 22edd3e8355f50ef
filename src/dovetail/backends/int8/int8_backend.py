"""Linear layers and convolutions in 8-bit integers, by oneDNN, after watching the values they are given."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from dovetail.backends.int8.int8_calibration import Calibration, Calibrations, ObservedRange, fingerprint
from dovetail.backends.int8.int8_kernels import (
    Int8Kernel,
    Int8Product,
    Ranging,
    channels_last,
    products_of,
    why_not_here,
)
from dovetail.errors import CallMismatch, InvalidArgument, checked_init
from dovetail.ir.graph_module import Body
from dovetail.ir.process_state import released_by_fork
from dovetail.lowering.backend_protocol import Answer, Backend, Compiled, why_not_plain
from dovetail.lowering.dispatch import CallSite
from dovetail.lowering.failures import LoweringFailure
from dovetail.lowering.guards import autocast_off, is_trial
from dovetail.lowering.lowered_state import lowering_of
from dovetail.numerics.sample_inputs import hint_of, random_state_kept
from dovetail.numerics.tolerance import relative_error
from dovetail.outlining.inline import flat
from dovetail.outlining.region import Region
from dovetail.rules.library.convolution import (
    CONVOLUTION,
    Channels,
    Images,
    Kernel,
    conv_bn_act_kind,
    convolved,
    groups_of,
)
from dovetail.rules.library.library_rule import LibraryRule, kind, known
from dovetail.rules.library.linear import (
    GATES,
    LINEAR,
    Bias,
    Rows,
    Weight,
    operands_are_weights,
    product,
    projected,
    weight_layout,
)
from dovetail.rules.patterns.alternatives import Const
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.rule import Decline, RuleSet

Code = Callable[..., Any]


class Int8Plan:
    """What is to be done with a body, the same for all calls of it.

    `plain` takes the operands. `watched` and `quantised` take before them, for each product, what is called with its
    input, or with its input, its residual and its weights and gives its result.
    """

    def __init__(self, body: Body, examples: Sequence[Any]) -> None:
        whole = flat(body)
        self.products = products_of(whole.graph)
        self.plain: Code = whole.forward
        self.watched = _code(whole.graph, self.products, _watch)
        self.quantised = _code(whole.graph, self.products, _replace)
        operands = [n for n in whole.graph.nodes if n.op == "placeholder"]
        self.numbers = tuple(
            tuple(None if w is None else operands.index(w) for w in _weights(p)) for p in self.products
        )
        self.layouts = _layouts(whole, self.products, examples)

    @property
    def constants(self) -> frozenset[int]:
        """The operands that must not change from call to call."""
        return frozenset(i for numbers in self.numbers for i in numbers if i is not None)

    def ranging(self) -> tuple[Ranging, ...]:
        """Products that need no calibration."""
        return tuple(Ranging(p, layout) for p, layout in zip(self.products, self.layouts, strict=True))

    def packed(self, seen: Sequence[ObservedRange], operands: Sequence[Any]) -> tuple[Int8Kernel, ...]:
        """Products for values like those seen, with the weights that are among the operands."""
        made: list[Int8Kernel] = []
        for i, int8_product in enumerate(self.products):
            weights = [None if k is None else operands[k] for k in self.numbers[i]]
            made.append(Int8Kernel(int8_product, seen[i], self.layouts[i], weights))
        return tuple(made)


def _weights(product: Int8Product) -> tuple[Node | None, ...]:
    return (product.weight, product.bias, *product.norm)


def _watch(graph: Graph, product: Int8Product, what: Node, env: dict[Node, Node]) -> None:
    graph.call_function(operator.call, (what, env[product.x]))


def _replace(graph: Graph, product: Int8Product, what: Node, env: dict[Node, Node]) -> None:
    residual = None if product.residual is None else env[product.residual]
    weights = [None if w is None else env[w] for w in _weights(product)]
    env[product.last] = graph.call_function(operator.call, (what, env[product.x], residual, *weights))


def _code(old: Graph, products: Sequence[Int8Product], put: Callable[..., None]) -> Code:
    """The code of a graph in which something is put at each product; what it takes in its place is left out."""
    graph = Graph()
    given = [graph.placeholder(f"product_{i}") for i in range(len(products))]
    replaces = put is _replace
    place = {(p.last if replaces else p.node): (p, what) for p, what in zip(products, given, strict=True)}
    gone = {node for p in products for node in p.taken} if replaces else set[Node]()
    env: dict[Node, Node] = {}
    for node in old.nodes:
        if node in place:
            product, what = place[node]
            put(graph, product, what, env)
        if node not in gone:
            env[node] = graph.node_copy(node, env.__getitem__)
    if replaces:
        graph.eliminate_dead_code()
    return GraphModule({}, graph).forward


class _Fake(Interpreter):
    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)


def _layouts(
    whole: GraphModule, products: Sequence[Int8Product], examples: Sequence[Any]
) -> tuple[torch.memory_format, ...]:
    """How the results of products lie in memory when the body computes them for such operands."""
    if all(p.window is None for p in products):
        return (torch.contiguous_format,) * len(products)
    ran = _Fake(whole)
    mode = next(e.fake_mode for e in examples if hasattr(e, "fake_mode"))
    with mode, torch.no_grad():
        ran.run(*examples)
    return tuple(_layout(p, cast("Tensor", ran.env[p.last])) for p in products)


def _layout(product: Int8Product, value: Tensor) -> torch.memory_format:
    if product.window is None:
        return torch.contiguous_format
    sizes, strides = ([hint_of(n) for n in numbers] for numbers in (value.shape, value.stride()))
    like = torch.empty_strided(sizes, strides, device="meta")
    for layout in (torch.contiguous_format, channels_last(len(product.window.stride))):
        if like.is_contiguous(memory_format=layout):
            return layout
    raise LoweringFailure(
        f"the result of '{product.node.name}' lies in memory as no integer convolution gives it"
    )


_CALLS = 4
_BOUND = 0.05


@checked_init()
class Int8(Backend):
    """Runs regions with products in int8: linear layers and convolutions, with the batch norm and activation behind.

    Each call of a region runs in float32 until it was calibrated: by `calibration`, sample inputs of the model that
    are run through it when it is lowered, fused by name or built (a tuple of arguments, a mapping of keyword arguments,
    or the one argument), otherwise in its own first `calibrate` calls. If its result in int8 is further than `bound` from that in
    float32, relative to its size, in the last of these, it stays in float32 and the record says so; `verify` allows
    code the same. Where the weights of one call change, all calls of the graph calibrate again.

    Weights have steps of their own for each output, values one range that takes in zero. For inference, in place of
    float32, on an x86 CPU with AVX512-VNNI. Values that are not finite become finite ones.
    """

    name = "int8"
    smallest = 1

    def __init__(
        self, calibration: Iterable[Any] = (), *, calibrate: int = _CALLS, bound: float = _BOUND
    ) -> None:
        _check(calibration, calibrate, bound)
        self.samples = tuple(calibration)
        self.calibrate = len(self.samples) or calibrate
        self.bound = float(bound)
        self.version = f"1 {torch.__version__}"

    @property
    def rules(self) -> Any:
        """What finds the regions it takes: the library's rules for products, and those that take them alone."""

        return RULES

    @property
    def options(self) -> Mapping[str, Any]:
        return {"calibrate": self.calibrate, "bound": self.bound, "samples": len(self.samples)}

    def supports(self, region: Region) -> Answer:
        reason = why_not_here() or why_not_plain(region)
        if reason is None:
            try:
                products_of(flat(cast("Body", region.body)).graph)
            except LoweringFailure as failure:
                reason = str(failure)
        return True if reason is None else Decline(reason)

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        return Uncalibrated(Int8Plan(cast("Body", region.body), examples))

    def prepare(self, site: CallSite) -> Compiled:
        plan = cast("Uncalibrated", site.compiled).plan
        changing = sorted(plan.constants - site.constants)
        if changing:
            site.tell(
                f"stays in float32: its operand {changing[0]} is a weight, and no parameter or constant"
            )
            return plan.plain
        return Calibrated(self, plan, site)

    def settle(self, lowered: nn.Module) -> None:
        """Run the sample inputs through a model or its graph; its state is put back afterwards."""
        if not self.samples:
            return
        buffers = [(b, b.detach().clone()) for b in lowered.buffers() if not b.is_inference()]
        versions = [b._version for b, _ in buffers]
        fitting = 0
        with torch.no_grad(), autocast_off(), random_state_kept():
            try:
                fitting = sum(_ran(lowered, sample) for sample in self.samples)
            finally:
                for (buffer, before), version in zip(buffers, versions, strict=True):
                    if buffer._version != version:
                        buffer.copy_(before)
        lowering = lowering_of(lowered) if isinstance(lowered, GraphModule) else None
        if fitting < len(self.samples) and lowering is not None:
            told = (
                f"{fitting} of {len(self.samples)} sample inputs fit this graph; calls make up for the others"
            )
            lowering.note("", self.name, "calibration", told)

    def __getstate__(self) -> dict[str, Any]:
        # What was calibrated travels with the graph; the samples would only make it large.
        return {**self.__dict__, "samples": ()}


def _check(calibration: Any, calibrate: Any, bound: Any) -> None:
    if isinstance(calibration, (str, Tensor, Mapping)) or not isinstance(calibration, Iterable):
        raise InvalidArgument("calibration: give an iterable of sample inputs, a tuple of arguments each.")
    if not isinstance(calibrate, int) or isinstance(calibrate, bool) or calibrate < 1:
        raise InvalidArgument(f"calibrate {calibrate!r}; give the number of calls, 1 or more.")
    if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not 0 < bound < float("inf"):
        raise InvalidArgument(f"bound {bound!r}; give a relative error such as 0.05.")


def _ran(lowered: nn.Module, sample: Any) -> bool:
    args, kwargs = (sample, {}) if isinstance(sample, tuple) else ((), sample)
    if not isinstance(sample, (tuple, Mapping)):
        args, kwargs = (sample,), {}
    try:
        lowered(*args, **kwargs)
    except CallMismatch:
        return False
    return True


class Uncalibrated:
    """A body whose products go to integers by the range of the very values they are given."""

    def __init__(self, plan: Int8Plan) -> None:
        self.plan, self.products = plan, plan.ranging()

    def __call__(self, *operands: Any) -> Any:
        with torch.no_grad():
            return self.plan.quantised(*self.products, *operands)


class Calibrated:
    """One call of a region: in float32 while it is watched, then in integers by ranges and weights that are fixed."""

    def __init__(self, backend: Int8, plan: Int8Plan, site: CallSite) -> None:
        self.plan, self.tell, self.name = plan, site.tell, site.name
        self.reads_in_place = site.constants - plan.constants
        self.wanted, self.bound = backend.calibrate, cast("float", backend.bound)
        self.fingerprint = fingerprint(site.operands[i] for i in sorted(plan.constants))
        self.all: Calibrations = site.notes.setdefault(backend.name, Calibrations())
        self._lock = released_by_fork(threading.Lock())
        known = self._known()
        seen = known.seen if not known.refused else None
        # One value, so that a thread never has the ranges of one calibration and the state of another.
        self._state: tuple[Calibration, tuple[Int8Kernel, ...] | None] = (
            known,
            None if seen is None else plan.packed(seen, site.operands),
        )

    def _known(self) -> Calibration:
        inputs = tuple(product.inputs for product in self.plan.products)
        return self.all.of(self.name, self.fingerprint, inputs, self.wanted)

    def __call__(self, *operands: Any) -> Any:
        known, steps = self._state
        if known.generation != self.all.generation:
            known, steps = self._state = (self._known(), None)
        if steps is not None:
            return self.plan.quantised(*steps, *operands)
        if known.refused or is_trial():
            return self.plan.plain(*operands)
        made = self.plan.watched(*known.watches, *operands)
        if known.watched():
            with self._lock:
                if self._state == (known, None) and not known.refused:
                    self._change_over(known, operands, made)
        return made

    def _change_over(self, known: Calibration, operands: tuple[Any, ...], made: Sequence[Any]) -> None:
        """From now on in integers, if that is close to what was just computed in float32."""
        assert known.seen is not None
        steps = self.plan.packed(known.seen, operands)
        instead = self.plan.quantised(*steps, *operands)
        pairs = [(a, b) for a, b in zip(instead, made, strict=True) if isinstance(b, Tensor)]
        error = max((relative_error(a, b) for a, b in pairs), default=0.0)
        if error > self.bound:
            known.refused = f"stays in float32: in int8 it is off by {error:.1%} of its size, and {self.bound:.1%} is allowed"
            self.tell(known.refused)
            return
        self._state = (known, steps)


_X, _WEIGHT, _BIAS = (torch.empty(s, device="meta") for s in ((2, 8, 16), (16, 16), (16,)))

# What is found with something behind it is not wanted alone.
_LAST = -5


@kind("linear", version=2)
def linear_kind(x: Rows, weight: Weight, bias: Bias = None, *, weight_layout: str = "out_in") -> Tensor:
    """A product and its bias."""
    return product(x, weight, bias, weight_layout)


@kind("conv", version=2)
def conv_kind(
    x: Images,
    weight: Kernel,
    bias: Channels = None,
    *,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int = 1,
) -> Tensor:
    """A convolution and its bias."""
    return conv_bn_act_kind(x, weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups)


@known(
    linear_kind,
    needs="linear|addmm|mm|matmul",
    attrs_of=lambda m: {"weight_layout": weight_layout(m)},
    examples=[(_X, _WEIGHT, _BIAS), (_X[0], _WEIGHT, _BIAS)],
    priority=_LAST,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A product with a weight, and its bias."""
    return projected(x, weight, bias)


linear.guard(operands_are_weights)


def _conv(rank: int) -> LibraryRule:
    ones: list[int] = [1] * rank
    image, kernel = (torch.empty(*s, *[n] * rank, device="meta") for s, n in (((2, 8), 8), ((8, 8), 3)))

    def attrs_of(match: Match) -> dict[str, Any]:
        named = {name: match[name] for name in ("stride", "padding", "dilation")}
        return {**named, "groups": groups_of(match["x"], match["weight"], rank)}

    @known(
        conv_kind,
        name=f"conv{rank}d",
        needs=f"conv{rank}d|convolution",
        attrs_of=attrs_of,
        examples=[(image, kernel, torch.empty(8, device="meta"))],
        priority=_LAST,
    )
    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        stride: Any = Const(ones),
        padding: Any = Const([0] * rank),
        dilation: Any = Const(ones),
    ) -> Tensor:
        return convolved(rank, x, weight, bias, stride, padding, dilation)

    return conv


# A gate whose two sides come from elsewhere has no product.
_GATED = [rule for rule in GATES if not rule.name.endswith("_gate")]
RULES = RuleSet(*_GATED, *LINEAR, *CONVOLUTION, linear, *(_conv(rank) for rank in (1, 2, 3)))
"""The kinds of the library that have a product with weights, and `linear` and `conv` for those that stand alone."""
