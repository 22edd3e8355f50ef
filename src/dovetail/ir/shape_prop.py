"""Fake tensor propagation: `meta["val"]` of graphs that `capture` did not return, and of single nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.errors import CaptureError
from dovetail.ir import source_location
from dovetail.ir.graph_module import Body, Program, copy_graph, rebuild
from dovetail.ir.nodes import storage_key
from dovetail.ir.process_state import defer_torch_output, preserve_rng_state
from dovetail.ir.schema import has_no_value, same_geometry, same_size

_aten = torch.ops.aten
_PRODUCTS = frozenset({_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution, _aten.linear})
_NUMBERS = (bool, int, float, complex, str, type(None), SymInt, SymFloat, SymBool)


def propagate_values(module: GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Program:
    """Return a copy of the graph with `meta["val"]` on every node, from example inputs or those in the graph's meta.

    Without either, the graph is copied as it is. Nothing real is run: parameters, buffers, inputs and the
    random state are untouched.
    """
    program = _copied(module)
    inputs = program.graph.find_nodes(op="placeholder")
    flat = _example_inputs(program, inputs, args, kwargs)
    if flat is None:
        return program
    mode = _first_mode(flat)
    if mode is None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = _Fakes(mode)
    with defer_torch_output(), preserve_rng_state(), mode, _OneDtype():
        given = [fakes.of(value) for value in flat]
        _ValuePropagation(program, fakes).run(*given, enable_io_processing=False)
    return program


def _copied(module: GraphModule) -> Program:
    shared: dict[int, Program] = {}
    inner: dict[str, Program] = {}
    for name, child in module._modules.items():
        if isinstance(child, GraphModule):
            if id(child) not in shared:
                shared[id(child)] = _copied(child)
            inner[name] = shared[id(child)]
    new = module.copied() if isinstance(module, Body) else rebuild(module, copy_graph(module.graph))
    new._modules.update(inner)
    return new


def _example_inputs(
    program: Program, inputs: Sequence[Node], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Any] | None:
    if args or kwargs:
        return _lined_up(program, inputs, args, kwargs)
    carried = [node.meta.get("val", node.meta.get("example_value")) for node in inputs]
    if inputs and not any(isinstance(value, FakeTensor) for value in carried):
        return None
    return carried


def _lined_up(
    program: Program, inputs: Sequence[Node], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return one value for each placeholder, from arguments as the graph's own forward takes them."""
    names = [cast(str, node.target) for node in inputs]
    if not kwargs:
        flat = list(program.graph.process_inputs(*args))
        missing = [node for node in inputs[len(flat) :] if not node.args]
        if len(flat) <= len(inputs) and not missing:
            return flat + [node.args[0] for node in inputs[len(flat) :]]
    else:
        by_name = dict(zip(names, args, strict=False)) | dict(kwargs)
        unknown = [k for k in kwargs if k not in names]
        doubled = [k for k in kwargs if k in names[: len(args)]]
        complete = all(n in by_name or node.args for n, node in zip(names, inputs, strict=True))
        if not unknown and not doubled and len(args) <= len(names) and complete:
            return [
                by_name[n] if n in by_name else node.args[0] for n, node in zip(names, inputs, strict=True)
            ]
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        if len(leaves) == len(inputs):
            return leaves
    count = len(args) + len(kwargs)
    raise CaptureError(
        f"the graph takes {len(inputs)} inputs ({', '.join(names) or 'none'}) and got {count} example inputs. "
        f"Give one for each."
    )


def _first_mode(values: Iterable[Any]) -> FakeTensorMode | None:
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


class _Fakes:
    """Fake tensors for real ones: one for each, so that those that share memory still do."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.fakes: dict[int, Tensor] = {}
        self.alive: list[Tensor] = []

    def of(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if id(value) not in self.fakes:
            self.fakes[id(value)] = self.mode.from_tensor(value, static_shapes=True)
            self.alive.append(value)
        return self.fakes[id(value)]


class _OneDtype(TorchDispatchMode):
    """Raises for products of different dtypes, which fake tensors accept and real ones do not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _PRODUCTS:
            dtypes = {a.dtype for a in args if isinstance(a, Tensor)}
            if len(dtypes) > 1:
                shown = " and ".join(sorted(map(str, dtypes)))
                raise TypeError(f"{func} needs one dtype for all its operands, and got {shown}")
        return func(*args, **(kwargs or {}))


class _ValuePropagation(Interpreter):
    """Runs a graph on fake tensors and writes each result into `meta["val"]`."""

    def __init__(self, module: GraphModule, fakes: _Fakes) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.fakes = fakes
        self.extra_traceback = False

    def run_node(self, n: Node) -> Any:
        try:
            result = super().run_node(n)
        except CaptureError:
            raise
        except Exception as error:
            line = source_location.of_node(n)
            where = f"\n  at {line}" if line is not None else ""
            raise CaptureError(
                f"node '{n.name}' ({n.format_node()}) fails on the example inputs: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}{where}\n"
                f"  Give example inputs with the shapes and dtypes that the graph is for."
            ) from error
        n.meta["val"] = None if n.op == "output" or has_no_value(n) else _recorded(result)
        return result

    def fetch_attr(self, target: str) -> Any:
        return self.fakes.of(super().fetch_attr(target))

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        child = self.fetch_attr(target)
        if isinstance(child, GraphModule):
            flat = (
                list(child.graph.process_inputs(*args))
                if not kwargs
                else _lined_up(cast(Program, child), child.graph.find_nodes(op="placeholder"), args, kwargs)
            )
            result = _ValuePropagation(child, self.fakes).run(*flat, enable_io_processing=False)
            return child.graph.process_outputs(result)
        return _called_on_fakes(child, self.fakes, args, kwargs)


def _called_on_fakes(child: nn.Module, fakes: _Fakes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module that is not a graph with its parameters and buffers replaced by fakes."""
    state = {name: fakes.of(p) for name, p in child.named_parameters(remove_duplicate=False)}
    state |= {name: fakes.of(b) for name, b in child.named_buffers(remove_duplicate=False)}
    return torch.func.functional_call(child, state, args, kwargs)


def _recorded(result: Any) -> Any:
    """Return what is stored of a result: fake tensors and numbers, in lists, tuples and dicts."""
    if isinstance(result, Tensor):
        with torch.no_grad():
            return result.detach() if result.requires_grad else result
    if isinstance(result, _NUMBERS):
        return result
    if isinstance(result, (list, tuple)):
        return type(result)(_recorded(v) for v in result) if not hasattr(result, "_fields") else result
    if isinstance(result, dict):
        return {k: _recorded(v) for k, v in cast("dict[Any, Any]", result).items()}
    return None


def fake_mode(nodes: Iterable[Node]) -> FakeTensorMode | None:
    """Return the fake mode of a graph's values; None if it has no fake values."""
    return _first_mode(node.meta.get("val") for node in nodes)


@contextlib.contextmanager
def fake_inference(mode: FakeTensorMode | None) -> Generator[None]:
    """Run operators on fake values, without autograd and without specializing symbols."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if mode is not None:
            stack.enter_context(mode)
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
        yield


def call_with_values(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """Call a node's function on other values of its arguments; raises what the function raises."""
    function = cast("Callable[..., Any]", node.target)
    args, kwargs = map_arg(node.args, value_of), map_arg(node.kwargs, value_of)
    return function(*cast("tuple[Any, ...]", args), **cast("dict[str, Any]", kwargs))


def same_layout(a: Any, b: Any) -> bool:
    """Whether two values have the same dtype, device, shape, strides and offset, tuples item by item."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return same_geometry(a, b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        left, right = cast("Sequence[Any]", a), cast("Sequence[Any]", b)
        return len(left) == len(right) and all(same_layout(x, y) for x, y in zip(left, right, strict=True))
    if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        return same_size(a, b)
    return type(a) is type(b) and a == b


def rebase_storages(value: Any, onto: dict[int, Tensor]) -> Any:
    """Return the value with each tensor whose storage is a key of `onto` replaced by a view of the tensor there."""
    if isinstance(value, Tensor):
        base = onto.get(storage_key(value))
        if base is None:
            return value
        return base.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, (tuple, list)):
        items = [rebase_storages(item, onto) for item in cast("Sequence[Any]", value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value
