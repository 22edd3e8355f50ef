"""Guards of a captured graph on its inputs, checked cheaply at every call, and how tensors overlap in memory.

`build_input_guards` derives them from the fake inputs of the graph and what the exporter assumed of symbolic sizes.
`InputGuards.check` raises CallMismatch for a call that the graph was not captured for: conditions on symbols first run as
one piece of generated code, and only if that fails one by one, to name the condition that does not hold.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, cast

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from dovetail.errors import CallMismatch
from dovetail.ir.graph_module import attribute
from dovetail.ir.guard_code import GuardCode
from dovetail.ir.nodes import storage_key

_COPY = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class GuardedState:
    """The state that a graph writes and, if it also writes inputs, the state that it reads, by attribute.

    Inputs must not share memory with it: the graph computes with one value of each, but in the model a write to one
    changes the other.
    """

    written: tuple[str, ...] = ()
    read: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.written or self.read)

    def shared(
        self, module: nn.Module, values: Sequence[Any], mutated: Collection[int]
    ) -> tuple[int, str, bool] | None:
        """Return an input and the state it shares memory with, and whether it is the state that is written."""
        tensors = [(i, value) for i, value in enumerate(values) if isinstance(value, Tensor)]
        mutable = [(i, value) for i, value in tensors if i in mutated]
        for targets, inputs, is_written in ((self.written, tensors, True), (self.read, mutable, False)):
            for target in targets:
                state = attribute(module, target)
                for i, value in inputs:
                    if isinstance(state, Tensor) and overlap(value, state):
                        return i, target, is_written
        return None


def guarded_state(graph: Graph, *, writes_inputs: bool) -> GuardedState:
    """Return the state of a captured graph, whose writes are copies at its end."""
    writes = [node.args[0] for node in graph.nodes if node.target is _COPY]
    written = [str(node.target) for node in writes if isinstance(node, Node) and node.op == "get_attr"]
    read = [str(node.target) for node in graph.find_nodes(op="get_attr")] if writes_inputs else []
    return GuardedState(tuple(dict.fromkeys(written)), tuple(dict.fromkeys(read)))


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two strided tensors may share memory."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return a is b
    if a.numel() == 0 or b.numel() == 0:
        return False
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):
        if storage_key(a) != storage_key(b):  # they have no data to point at
            return False
    elif a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    (start_a, end_a), (start_b, end_b) = _extent(a), _extent(b)
    return start_a < end_b and start_b < end_a


def _extent(value: Tensor) -> tuple[int, int]:
    start = int(value.storage_offset()) * value.element_size()
    steps = [int((size - 1) * stride) for size, stride in zip(value.shape, value.stride(), strict=True)]
    span = sum(steps) + 1
    return start, start + span * value.element_size()


def overlaps_itself(value: Tensor) -> bool:
    """Return whether two elements of a strided tensor may have the same address, as in an expanded one."""
    if value.layout is not torch.strided:
        return False
    if isinstance(value, FakeTensor) and value._has_symbolic_sizes_strides:
        # Comparing symbols would add guards to the graph.
        return any(type(stride) is int and stride == 0 for stride in value.stride())
    if value.is_contiguous():
        return False
    span = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size == 0:
            return False
        if size > 1:
            if stride <= span:
                return True
            span += stride * (size - 1)
    return False


def same_elements(a: Tensor, b: Tensor) -> bool:
    """Return whether two values are the same elements of one storage."""
    if a.layout is not torch.strided or b.layout is not torch.strided or a.dim() != b.dim():
        return False
    same = storage_key(a) == storage_key(b) and a.dtype == b.dtype
    return same and str(a.shape) == str(b.shape) and str(a.stride()) == str(b.stride())


_AGAIN = "Capture the model again with such inputs"


@dataclass(frozen=True)
class TensorInput:
    """A tensor with these properties; a size that is text is an expression over symbols.

    `strides` is empty if any are accepted; one that is None was symbolic.
    """

    path: str
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int | str, ...]
    mutated: bool
    ungraded: bool = False
    strides: tuple[int | None, ...] = ()

    @cached_property
    def static(self) -> torch.Size | None:
        """Return the whole shape, or None if a size is symbolic."""
        fixed = [size for size in self.sizes if isinstance(size, int)]
        return torch.Size(fixed) if len(fixed) == len(self.sizes) else None


@dataclass(frozen=True)
class SymbolInput:
    """A number that was left symbolic."""

    path: str
    expression: str


@dataclass(frozen=True)
class ConstantInput:
    """A value that is baked into the graph."""

    path: str
    value: Any


@dataclass(frozen=True)
class ObjectInput:
    """An opaque object that is passed through."""

    path: str


Input = TensorInput | SymbolInput | ConstantInput | ObjectInput


@dataclass(frozen=True)
class InputGuards:
    """All that capture assumed about the inputs.

    `ranges` bounds each symbol; `solved` gives a symbol that is not a size by itself as an expression of the `size` that
    contains it; `guards` are further conditions, as Python over the symbols. `twins` are inputs that were one tensor: the
    exporter reads only one of them, and the model may compute something else for two. `owned` is the state that inputs
    must not share memory with. `function` is an autograd.Function of the model whose backward formula the graph does not
    have; if there is one, only the state in `graded` may require gradients.
    """

    inputs: tuple[Input, ...]
    ranges: tuple[tuple[str, int | None, int | None], ...] = ()
    solved: tuple[tuple[str, str, str], ...] = ()
    guards: tuple[str, ...] = ()
    twins: tuple[tuple[int, int], ...] = ()
    owned: GuardedState = GuardedState()
    function: str = ""
    graded: tuple[str, ...] = ()

    def check(self, module: nn.Module, values: Sequence[Any]) -> None:
        """Raise CallMismatch unless the graph of `module` was captured for such values."""
        if len(values) != len(self.inputs):
            raise CallMismatch(
                f"the graph takes {len(self.inputs)} inputs and was called with {len(values)}."
            )
        symbolic = False
        for expected, value in zip(self.inputs, values, strict=True):
            if type(expected) is TensorInput:
                # In one expression what most inputs are, for it is evaluated in every call.
                if (
                    isinstance(value, Tensor)
                    and value.shape == expected.static
                    and value.dtype is expected.dtype
                    and value.device == expected.device
                    and not expected.strides
                ):
                    continue
                symbolic |= _check_tensor(expected, value)
            elif type(expected) is ConstantInput:
                _check_constant(expected, value)
            elif type(expected) is SymbolInput:
                symbolic = True
        if symbolic:
            self._check_sizes(values)
        if self._mutated:
            self._check_distinct(values)
        if (self._ungraded or self.function) and torch.is_grad_enabled():
            self._check_ungraded(module, values)
        if self.owned:
            self._check_owned(module, values)
        for i, j in self.twins:
            if values[i] is not values[j]:
                raise CallMismatch(
                    f"'{self.inputs[i].path}' and '{self.inputs[j].path}' were one and the same tensor when the graph "
                    f"was captured, and are two here. Capture the model again with two tensors."
                )

    @cached_property
    def _mutated(self) -> tuple[int, ...]:
        return tuple(i for i, e in enumerate(self.inputs) if isinstance(e, TensorInput) and e.mutated)

    @cached_property
    def _ungraded(self) -> tuple[int, ...]:
        return tuple(i for i, e in enumerate(self.inputs) if isinstance(e, TensorInput) and e.ungraded)

    @cached_property
    def _compiled(self) -> Mapping[str, Any]:
        texts = {size for e in self.inputs if isinstance(e, TensorInput) for size in e.sizes}
        texts |= {e.expression for e in self.inputs if isinstance(e, SymbolInput)}
        texts |= {inverse for _, _, inverse in self.solved} | set(self.guards)
        return {t: compile(t, "<guard>", "eval") for t in texts if isinstance(t, str)}

    @cached_property
    def _holds(self) -> Callable[[Sequence[Any]], bool]:
        """Return all conditions on symbols as one function, which does not report which of them fails."""
        if self.solved:
            return lambda values: False
        code = GuardCode(_ARITHMETIC)
        for i, expected in enumerate(self.inputs):
            if isinstance(expected, SymbolInput):
                code.match(expected.expression, f"values[{i}]")
            elif isinstance(expected, TensorInput):
                code.assign(f"_shape{i}", f"values[{i}].shape")
                for dim, size in enumerate(expected.sizes):
                    if isinstance(size, str):
                        code.match(size, f"_shape{i}[{dim}]")
        code.test_ranges(self.ranges)
        code.test(*(f"({guard})" for guard in self.guards))
        return code.compile()

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def _check_sizes(self, values: Sequence[Any]) -> None:
        try:
            if not self._holds(values):
                self._check_symbols(values)
        except (ArithmeticError, ValueError, TypeError) as error:
            raise CallMismatch(
                f"a condition on the sizes of the inputs cannot be computed for these: {error}. {_AGAIN}."
            ) from error

    def _check_symbols(self, values: Sequence[Any]) -> None:
        sizes = list(_stated_sizes(self.inputs, values))
        bound: dict[str, Any] = {}
        where: dict[str, str] = {}
        for text, actual, place in sizes:
            if text.isidentifier() and text not in bound:
                bound[text], where[text] = actual, place
        hidden = {text: (actual, place) for text, actual, place in sizes}
        for name, text, inverse in self.solved:
            if text in hidden:
                actual, place = hidden[text]
                bound[name] = eval(self._compiled[inverse], _ARITHMETIC, {"size": actual})
                where[name] = place
        for name, low, high in self.ranges:
            actual = bound.get(name)
            if actual is None:
                continue
            if (low is not None and actual < low) or (high is not None and actual > high):
                span = f"{'-∞' if low is None else low} to {'∞' if high is None else high}"
                raise CallMismatch(
                    f"{where[name]} is {actual}, outside the captured range {span}. "
                    f"Capture the model again with a wider dynamic_shapes."
                )
        for text, actual, place in sizes:
            required = eval(self._compiled[text], _ARITHMETIC, bound)
            if required != actual:
                raise CallMismatch(
                    f"{place} is {actual}, but must be {required} ({_named(text, where)}). {_AGAIN}."
                )
        for guard in self.guards:
            if not eval(self._compiled[guard], _ARITHMETIC, bound):
                shown = ", ".join(f"{where[n]} = {bound[n]}" for n in bound if n in guard)
                raise CallMismatch(
                    f"the graph was captured for inputs with {_named(guard, where)}, which does not hold here "
                    f"({shown}). {_AGAIN}."
                )

    def _check_distinct(self, values: Sequence[Any]) -> None:
        for i in self._mutated:
            _check_written(cast(TensorInput, self.inputs[i]), values[i])
            for j, other in enumerate(values):
                if j == i or not isinstance(other, Tensor) or (j < i and j in self._mutated):
                    continue
                if overlap(values[i], other):
                    first, second = sorted((i, j))
                    raise CallMismatch(
                        f"'{self.inputs[first].path}' and '{self.inputs[second].path}' share memory, and the "
                        f"model writes to '{self.inputs[i].path}'; they were distinct when it was captured. "
                        f"Pass a clone of one of them."
                    )

    def _check_ungraded(self, module: nn.Module, values: Sequence[Any]) -> None:
        if self.function:
            self._check_function(module, values)
        for i in self._ungraded:
            if values[i].requires_grad:
                raise CallMismatch(
                    f"'{self.inputs[i].path}' requires gradients, and did not when the graph was captured. The model writes "
                    f"in place (through detach(), in torch.no_grad(), or by an operator whose functional form has no "
                    f"derivative), and the gradients would be others. {_AGAIN}, or detach it."
                )

    def _check_function(self, module: nn.Module, values: Sequence[Any]) -> None:
        graded = [self.inputs[i].path for i in self._ungraded if values[i].requires_grad]
        state = itertools.chain(module.named_parameters(), module.named_buffers())
        graded += (name for name, tensor in state if tensor.requires_grad and name not in self.graded)
        if graded:
            raise CallMismatch(
                f"'{graded[0]}' requires gradients, and the graph was captured without any for it: forward applies "
                f"{self.function}, whose own backward formula the graph does not have. Call it in torch.no_grad(). For "
                f"training make the function a custom operator (torch.library.custom_op with register_autograd) and "
                f"capture the model again with gradients."
            )

    def _check_owned(self, module: nn.Module, values: Sequence[Any]) -> None:
        shared = self.owned.shared(module, values, self._mutated)
        if shared is not None:
            i, target, writes = shared
            written = f"writes to {'that' if writes else 'it'}"
            raise CallMismatch(
                f"'{self.inputs[i].path}' shares memory with the model's '{target}', and the model {written}; they "
                f"were distinct when it was captured. Pass a clone."
            )


_ARITHMETIC: dict[str, Any] = {
    "__builtins__": {"max": max, "min": min, "abs": abs, "round": round, "int": int}
}


def _check_tensor(expected: TensorInput, value: Any) -> bool:
    """Check the properties of one tensor, and return whether it has symbolic sizes."""
    if not isinstance(value, Tensor):
        raise CallMismatch(
            f"'{expected.path}' was captured as a tensor and is {_shown(value)} here. {_AGAIN}."
        )
    if value.dtype is not expected.dtype:
        raise CallMismatch(
            f"'{expected.path}' was captured as {expected.dtype} and is {value.dtype} here. "
            f"Convert it, or capture the model again with that dtype."
        )
    if value.device != expected.device:
        raise CallMismatch(
            f"'{expected.path}' was captured on {expected.device} and is on {value.device} here; constants and "
            f"devices are baked into the graph. Move it, or capture the model again there."
        )
    static = expected.static
    if static is not None:
        if value.shape == static:
            if expected.strides:
                _check_strides(expected, value)
            return False
        raise CallMismatch(
            f"'{expected.path}' was captured with shape {tuple(static)} and has {tuple(value.shape)} here. "
            f"{_AGAIN}, or with dynamic_shapes."
        )
    if value.dim() != len(expected.sizes):
        raise CallMismatch(
            f"'{expected.path}' was captured with {len(expected.sizes)} dimensions and has {value.dim()} here. {_AGAIN}."
        )
    for dim, size in enumerate(expected.sizes):
        if isinstance(size, int) and value.shape[dim] != size:
            raise CallMismatch(
                f"'{expected.path}' was captured with size {size} in dimension {dim} and has {value.shape[dim]} "
                f"here. {_AGAIN}, or make that dimension dynamic."
            )
    _check_strides(expected, value)
    return True


def _check_strides(expected: TensorInput, value: Tensor) -> None:
    if not expected.strides or value.layout is not torch.strided:
        return
    for size, stride, captured in zip(value.shape, value.stride(), expected.strides, strict=True):
        if size != 1 and captured is not None and stride != captured:
            shown = tuple("?" if n is None else n for n in expected.strides)
            raise CallMismatch(
                f"'{expected.path}' was captured with strides ({', '.join(map(str, shown))}) and has {value.stride()} "
                f"here, and the model reads strides or draws random numbers in the order of memory. {_AGAIN}, or pass "
                f"it with those strides."
            )


def _check_written(expected: TensorInput, value: Tensor) -> None:
    if overlaps_itself(value):
        raise CallMismatch(
            f"elements of '{expected.path}' overlap in memory, and the model writes to it. Pass a clone of it."
        )


def _check_constant(expected: ConstantInput, value: Any) -> None:
    constant = expected.value
    if value is constant:
        return
    same_type = type(value) is type(constant)
    if same_type and (value == constant or (value != value and constant != constant)):
        return
    raise CallMismatch(
        f"'{expected.path}' was {constant!r} when the graph was captured and is {_shown(value)} here; the value is baked "
        f"into the graph. {_AGAIN}."
    )


def _shown(value: Any) -> str:
    has_literal = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if has_literal else f"a {type(value).__name__}"


def _stated_sizes(inputs: Sequence[Input], values: Sequence[Any]) -> list[tuple[str, Any, str]]:
    sizes: list[tuple[str, Any, str]] = []
    for expected, value in zip(inputs, values, strict=True):
        if isinstance(expected, SymbolInput):
            sizes.append((expected.expression, value, f"'{expected.path}'"))
        elif isinstance(expected, TensorInput):
            for dim, size in enumerate(expected.sizes):
                if isinstance(size, str):
                    sizes.append((size, value.shape[dim], f"size {dim} of '{expected.path}'"))
    return sizes


def _named(text: str, where: Mapping[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda name: f"({where[name[0]]})" if name[0] in where else name[0], text)


def build_input_guards(
    values: Sequence[Any],
    paths: Sequence[str],
    mutated: frozenset[int],
    range_constraints: Mapping[Any, Any],
    guards: Sequence[Any],
    unused: frozenset[int],
    owned: GuardedState,
    ungraded: frozenset[int],
    strided: bool,
    function: str,
    graded: tuple[str, ...],
) -> InputGuards:
    """Return the guards that follow from the fake inputs of a graph and what its exporter assumed.

    With `strided` floating inputs must have the strides that they were captured with.
    """
    inputs = tuple(
        _input(v, path, i in mutated, i in ungraded, strided)
        for i, (v, path) in enumerate(zip(values, paths, strict=True))
    )
    import sympy

    expressions = [e for value in values for e in _expressions(value)]
    known = {e for e in expressions if isinstance(e, sympy.Symbol)}
    solved: list[tuple[str, str, str]] = []
    for expression in expressions:
        hidden = [s for s in expression.free_symbols if s not in known]
        if len(hidden) == 1:
            size = sympy.Symbol("size", integer=True)
            answers = sympy.solve(expression - size, hidden[0])
            if len(answers) == 1 and answers[0].free_symbols == {size}:
                solved.append((str(hidden[0]), _source(expression), f"int({_source(answers[0])})"))
                known.add(hidden[0])
    ranges = tuple(
        (str(symbol), _bound(limits.lower), _bound(limits.upper))
        for symbol, limits in range_constraints.items()
        if symbol in known
    )
    kept = tuple(dict.fromkeys(_source(g) for g in guards if g.free_symbols and g.free_symbols <= known))
    return InputGuards(inputs, ranges, tuple(solved), kept, _twins(values, unused), owned, function, graded)


def _twins(values: Sequence[Any], unused: frozenset[int]) -> tuple[tuple[int, int], ...]:
    """Return pairs of inputs that were one tensor: the same memory, and nothing reads the first."""
    twins: list[tuple[int, int]] = []
    read = [j for j, value in enumerate(values) if isinstance(value, Tensor) and j not in unused]
    for i in sorted(unused):
        if isinstance(values[i], Tensor):
            twins.extend((i, j) for j in read if same_elements(values[i], values[j]))
    return tuple(twins)


def _input(value: Any, path: str, mutated: bool, ungraded: bool, strided: bool) -> Input:
    if isinstance(value, Tensor):
        sizes = tuple(_size(s) for s in value.shape)
        strides: tuple[int | None, ...] = ()
        # Slices of token ids are common inputs, and every embedding of them is contiguous.
        if strided and value.layout is torch.strided and not _is_index(value):
            strides = tuple(
                None if isinstance(n, SymInt) else n for n in cast("tuple[Any, ...]", value.stride())
            )
        return TensorInput(path, value.dtype, value.device, sizes, mutated, ungraded, strides)
    if isinstance(value, (SymInt, SymFloat, SymBool)):
        return SymbolInput(path, _source(value.node.expr))
    if value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return ConstantInput(path, value)
    return ObjectInput(path)


def _is_index(value: Tensor) -> bool:
    return not value.dtype.is_floating_point and not value.dtype.is_complex


def _size(size: Any) -> int | str:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else _source(expression)


def _expressions(value: Any) -> list[Any]:
    sizes = list(value.shape) if isinstance(value, Tensor) else [value]
    return [s.node.expr for s in sizes if isinstance(s, (SymInt, SymFloat, SymBool))]


def _source(expression: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    return PythonPrinter().doprint(expression)


def _bound(limit: Any) -> int | None:
    import sympy
    from torch.utils._sympy.numbers import int_oo

    return None if limit in (int_oo, -int_oo, sympy.oo, -sympy.oo) else int(limit)
