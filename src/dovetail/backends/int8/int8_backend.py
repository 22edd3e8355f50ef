"""Linear layers and convolutions in 8-bit integers, by oneDNN, after calibration with observed inputs."""

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
    DynamicInt8Kernel,
    Int8Kernel,
    Int8Product,
    channels_last,
    products_of,
    why_not_here,
)
from dovetail.errors import CallMismatch, InvalidArgument, checked_init
from dovetail.ir.graph_module import Body
from dovetail.ir.nodes import example_size
from dovetail.ir.process_state import preserve_rng_state, reset_at_fork
from dovetail.lowering.backend_protocol import Answer, Backend, CallSite, Compiled
from dovetail.lowering.failures import LoweringFailure
from dovetail.lowering.guards import disable_autocast, is_trial
from dovetail.lowering.lowered_state import lowered_state_of
from dovetail.lowering.region_support import why_effectful
from dovetail.numerics.tolerance import relative_error
from dovetail.outlining.inline import flat
from dovetail.outlining.region import Region
from dovetail.rules.library.convolution import (
    CONVOLUTION,
    Channels,
    Images,
    Kernel,
    conv_bn_act_kind,
    conv_pattern,
    group_count,
)
from dovetail.rules.library.library_rule import LibraryRule, kind, library_rule
from dovetail.rules.library.linear import (
    GATES,
    LINEAR,
    Bias,
    Rows,
    Weight,
    linear_pattern,
    operands_have_weight_shapes,
    project,
    weight_layout,
)
from dovetail.rules.patterns.alternatives import Const
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.rule import Decline, RuleSet

Code = Callable[..., Any]


class Int8Plan:
    """The code variants of a body, shared by all its calls.

    `float_forward` takes the operands. `observed` and `quantised` take before them, for each product, a function of its
    input, or of its input, its residual and its weights, which returns the result.
    """

    def __init__(self, body: Body, examples: Sequence[Any]) -> None:
        whole = flat(body)
        self.products = products_of(whole.graph)
        self.float_forward: Code = whole.forward
        self.observed = _code(whole.graph, self.products, _observe)
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

    def dynamic_kernels(self) -> tuple[DynamicInt8Kernel, ...]:
        """Return kernels that need no calibration."""
        return tuple(
            DynamicInt8Kernel(p, layout) for p, layout in zip(self.products, self.layouts, strict=True)
        )

    def kernels(self, ranges: Sequence[ObservedRange], operands: Sequence[Any]) -> tuple[Int8Kernel, ...]:
        """Return kernels for inputs in these ranges, with the weights among the operands packed."""
        kernels: list[Int8Kernel] = []
        for i, int8_product in enumerate(self.products):
            weights = [None if k is None else operands[k] for k in self.numbers[i]]
            kernels.append(Int8Kernel(int8_product, ranges[i], self.layouts[i], weights))
        return tuple(kernels)


def _weights(product: Int8Product) -> tuple[Node | None, ...]:
    return (product.weight, product.bias, *product.norm)


def _observe(graph: Graph, product: Int8Product, what: Node, env: dict[Node, Node]) -> None:
    graph.call_function(operator.call, (what, env[product.x]))


def _replace(graph: Graph, product: Int8Product, what: Node, env: dict[Node, Node]) -> None:
    residual = None if product.residual is None else env[product.residual]
    weights = [None if w is None else env[w] for w in _weights(product)]
    env[product.last] = graph.call_function(operator.call, (what, env[product.x], residual, *weights))


def _code(old: Graph, products: Sequence[Int8Product], put: Callable[..., None]) -> Code:
    """Return the code of a graph with a call put at each product, without the nodes that it replaces."""
    graph = Graph()
    callables = [graph.placeholder(f"product_{i}") for i in range(len(products))]
    replaces = put is _replace
    place = {(p.last if replaces else p.node): (p, what) for p, what in zip(products, callables, strict=True)}
    removed = {node for p in products for node in p.fused} if replaces else set[Node]()
    env: dict[Node, Node] = {}
    for node in old.nodes:
        if node in place:
            product, what = place[node]
            put(graph, product, what, env)
        if node not in removed:
            env[node] = graph.node_copy(node, env.__getitem__)
    if replaces:
        graph.eliminate_dead_code()
    return GraphModule({}, graph).forward


def _layouts(
    whole: GraphModule, products: Sequence[Int8Product], examples: Sequence[Any]
) -> tuple[torch.memory_format, ...]:
    """Return the memory formats of the results of products when the body computes them for such operands."""
    if all(p.window is None for p in products):
        return (torch.contiguous_format,) * len(products)
    interpreter = Interpreter(whole, garbage_collect_values=False)
    mode = next(e.fake_mode for e in examples if hasattr(e, "fake_mode"))
    with mode, torch.no_grad():
        interpreter.run(*examples)
    return tuple(_layout(p, cast("Tensor", interpreter.env[p.last])) for p in products)


def _layout(product: Int8Product, value: Tensor) -> torch.memory_format:
    if product.window is None:
        return torch.contiguous_format
    sizes, strides = ([example_size(n) for n in numbers] for numbers in (value.shape, value.stride()))
    like = torch.empty_strided(sizes, strides, device="meta")
    for layout in (torch.contiguous_format, channels_last(len(product.window.stride))):
        if like.is_contiguous(memory_format=layout):
            return layout
    raise LoweringFailure(
        f"the result of '{product.node.name}' has a memory layout that no integer convolution returns"
    )


_CALLS = 4
_BOUND = 0.05


@checked_init()
class Int8(Backend):
    """Runs regions with products in int8: linear layers and convolutions, with the batch norm and activation behind.

    Each call of a region runs in float32 until it is calibrated: with `calibration`, sample inputs of the model that are
    run through it when it is lowered, fused by name or built (a tuple of arguments, a mapping of keyword arguments, or
    the one argument), otherwise in its own first `calibrate` calls. If its result in int8 is further than `bound` from
    that in float32, relative to its size, in the last of these, it stays in float32 and the record reports it; `verify`
    allows the same error. If the weights of one call change, all calls of the graph are calibrated again.

    Weights have a scale for each output, inputs one range that includes zero. For inference, in place of float32, on an
    x86 CPU with AVX512-VNNI. Values that are not finite become finite.
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
    def rules(self) -> RuleSet:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The rules for its regions: the library's rules for products, and rules for single products."""

        return RULES

    @property
    def options(self) -> Mapping[str, Any]:
        return {"calibrate": self.calibrate, "bound": self.bound, "samples": len(self.samples)}

    def supports(self, region: Region) -> Answer:
        reason = why_not_here() or why_effectful(region)
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
                f"stays in float32: its operand {changing[0]} is a weight, but not a parameter or constant"
            )
            return plan.float_forward
        return Calibrated(self, plan, site)

    def settle(self, lowered: nn.Module) -> None:
        """Run the sample inputs through a model or its graph, and restore its state."""
        if not self.samples:
            return
        buffers = [(b, b.detach().clone()) for b in lowered.buffers() if not b.is_inference()]
        versions = [b._version for b, _ in buffers]
        fitting = 0
        with torch.no_grad(), disable_autocast(), preserve_rng_state():
            try:
                fitting = sum(_run_sample(lowered, sample) for sample in self.samples)
            finally:
                for (buffer, before), version in zip(buffers, versions, strict=True):
                    if buffer._version != version:
                        buffer.copy_(before)
        lowering = lowered_state_of(lowered) if isinstance(lowered, GraphModule) else None
        if fitting < len(self.samples) and lowering is not None:
            message = (
                f"{fitting} of {len(self.samples)} sample inputs match this graph; calls replace the others"
            )
            lowering.note("", self.name, "calibration", message)

    def __getstate__(self) -> dict[str, Any]:
        # The calibration is pickled with the graph; the samples would only make it large.
        return {**self.__dict__, "samples": ()}


def _check(calibration: Any, calibrate: Any, bound: Any) -> None:
    if isinstance(calibration, (str, Tensor, Mapping)) or not isinstance(calibration, Iterable):
        raise InvalidArgument("calibration: give an iterable of sample inputs, a tuple of arguments each.")
    if not isinstance(calibrate, int) or isinstance(calibrate, bool) or calibrate < 1:
        raise InvalidArgument(f"calibrate {calibrate!r}; give the number of calls, 1 or more.")
    if not isinstance(bound, (int, float)) or isinstance(bound, bool) or not 0 < bound < float("inf"):
        raise InvalidArgument(f"bound {bound!r}; give a relative error such as 0.05.")


def _run_sample(lowered: nn.Module, sample: Any) -> bool:
    args, kwargs = (sample, {}) if isinstance(sample, tuple) else ((), sample)
    if not isinstance(sample, (tuple, Mapping)):
        args, kwargs = (sample,), {}
    try:
        lowered(*args, **kwargs)
    except CallMismatch:
        return False
    return True


class Uncalibrated:
    """A body whose products are quantized with the range of their current inputs."""

    def __init__(self, plan: Int8Plan) -> None:
        self.plan, self.kernels = plan, plan.dynamic_kernels()

    def __call__(self, *operands: Any) -> Any:
        with torch.no_grad():
            return self.plan.quantised(*self.kernels, *operands)


class Calibrated:
    """One call of a region: in float32 while it is observed, then in int8 with fixed ranges and weights."""

    def __init__(self, backend: Int8, plan: Int8Plan, site: CallSite) -> None:
        self.plan, self.tell, self.name = plan, site.tell, site.name
        self.reads_in_place = site.constants - plan.constants
        self.required, self.bound = backend.calibrate, cast("float", backend.bound)
        self.fingerprint = fingerprint(site.operands[i] for i in sorted(plan.constants))
        self.all: Calibrations = site.notes.setdefault(backend.name, Calibrations())
        self._lock = reset_at_fork(threading.Lock())
        known = self._known()
        ranges = known.ranges if not known.refused else None
        # One tuple, so that a thread never sees the kernels of one calibration with the state of another.
        self._state: tuple[Calibration, tuple[Int8Kernel, ...] | None] = (
            known,
            None if ranges is None else plan.kernels(ranges, site.operands),
        )

    def _known(self) -> Calibration:
        inputs = tuple(product.inputs for product in self.plan.products)
        return self.all.of(self.name, self.fingerprint, inputs, self.required)

    def __call__(self, *operands: Any) -> Any:
        known, kernels = self._state
        if known.generation != self.all.generation:
            known, kernels = self._state = (self._known(), None)
        if kernels is not None:
            return self.plan.quantised(*kernels, *operands)
        if known.refused or is_trial():
            return self.plan.float_forward(*operands)
        results = self.plan.observed(*known.observers, *operands)
        if known.observe_call():
            with self._lock:
                if self._state == (known, None) and not known.refused:
                    self._switch_to_int8(known, operands, results)
        return results

    def _switch_to_int8(self, known: Calibration, operands: tuple[Any, ...], results: Sequence[Any]) -> None:
        """Run in int8 from now on, if that is close to the results in float32."""
        assert known.ranges is not None
        kernels = self.plan.kernels(known.ranges, operands)
        quantised = self.plan.quantised(*kernels, *operands)
        pairs = [(a, b) for a, b in zip(quantised, results, strict=True) if isinstance(b, Tensor)]
        error = max((relative_error(a, b) for a, b in pairs), default=0.0)
        if error > self.bound:
            known.refused = f"stays in float32: in int8 it is off by {error:.1%} of its size, and {self.bound:.1%} is allowed"
            self.tell(known.refused)
            return
        self._state = (known, kernels)


_X, _WEIGHT, _BIAS = (torch.empty(s, device="meta") for s in ((2, 8, 16), (16, 16), (16,)))

# A product with a fused operation behind it is preferred to one alone.
_LAST = -5


@kind("linear", version=2)
def linear_kind(x: Rows, weight: Weight, bias: Bias = None, *, weight_layout: str = "out_in") -> Tensor:
    """A product and its bias."""
    return project(x, weight, bias, weight_layout)


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


@library_rule(
    linear_kind,
    needs="linear|addmm|mm|matmul",
    attrs_of=lambda m: {"weight_layout": weight_layout(m)},
    examples=[(_X, _WEIGHT, _BIAS), (_X[0], _WEIGHT, _BIAS)],
    priority=_LAST,
)
def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A product with a weight, and its bias."""
    return linear_pattern(x, weight, bias)


linear.guard(operands_have_weight_shapes)


def _conv(rank: int) -> LibraryRule:
    ones: list[int] = [1] * rank
    image, kernel = (torch.empty(*s, *[n] * rank, device="meta") for s, n in (((2, 8), 8), ((8, 8), 3)))

    def attrs_of(match: Match) -> dict[str, Any]:
        named = {name: match[name] for name in ("stride", "padding", "dilation")}
        return {**named, "groups": group_count(match["x"], match["weight"], rank)}

    @library_rule(
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
        return conv_pattern(rank, x, weight, bias, stride, padding, dilation)

    return conv


# A gate rule without projections has no product.
_GATED = [rule for rule in GATES if not rule.name.endswith("_gate")]
RULES = RuleSet(*_GATED, *LINEAR, *CONVOLUTION, linear, *(_conv(rank) for rank in (1, 2, 3)))
"""The library's rules with a product of weights, and `linear` and `conv` for single products."""
