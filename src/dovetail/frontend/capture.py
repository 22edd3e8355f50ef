"""Capture: from a model to a functional graph that is called, trained and saved as the model is."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import SymInt, Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from dovetail import config, torch_compat
from dovetail.errors import CaptureError, CaptureMismatch, InvalidArgument, checked_call
from dovetail.frontend import cache_pytrees, calling_convention, export, model_copy, side_effects
from dovetail.frontend.calling_convention import Convention, ModelCodeGen
from dovetail.frontend.check_capture import check_against_model, has_data
from dovetail.frontend.input_guards import build_input_guards, guarded_state, overlap
from dovetail.frontend.model_copy import structural_copy
from dovetail.frontend.unlift import Unlifted, unlift
from dovetail.ir.canonicalize import canonicalize
from dovetail.ir.graph_module import Program, pause_gc
from dovetail.ir.meta_keys import CANONICAL, DIM_NAMES, REPLAYED
from dovetail.ir.process_state import forked_while_tracing, reset_at_fork, tracing
from dovetail.ir.shape_prop import propagate_values

_log = logging.getLogger(__name__)
CAPTURING = reset_at_fork(threading.RLock())
"""Held while a model is traced: torch traces one at a time."""


@checked_call(dynamic="`dynamic_shapes`, as torch.export takes them", backends="them to `lower` or `compile`")
def capture(
    model: Callable[..., Any] | ExportedProgram,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
    strict: bool = False,
    check_capture: bool = False,
) -> GraphModule:
    """Return a graph that computes what `model` does and is called as it is.

    `model` is a module, any callable, an ExportedProgram, or an FX GraphModule, of which only `meta["val"]` is
    computed. The graph uses the model's own parameters and buffers. What it cannot hold (control flow that depends on
    data, Python side effects) raises CaptureError with the line of source. With `check_capture` the graph and the model
    are run on the example inputs, from the same state, which is restored; CaptureMismatch is raised if results, written
    inputs, buffers or the random stream differ.
    """
    torch_compat.warn_if_untested()
    args, kwargs = _checked(args, kwargs)
    if isinstance(model, GraphModule):
        return propagate_values(model, args, kwargs)
    if isinstance(model, ExportedProgram):
        if check_capture:
            raise InvalidArgument(
                "check_capture compares with a model; it cannot be used with an ExportedProgram."
            )
        return _from_program(export.own(model))
    if not isinstance(check_capture, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"check_capture {check_capture!r}; give True or False.")
    graph = trace(model, args, kwargs, dynamic_shapes, strict, is_compared=check_capture)
    return checked(model, graph, args, kwargs, dynamic_shapes, strict) if check_capture else graph


def trace(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any = None,
    strict: bool = False,
    *,
    is_compared: bool = False,
) -> GraphModule:
    """Return the graph of a module or callable. `is_compared` is whether it will be given to `checked`."""
    args, kwargs = _checked(args, kwargs)
    if forked_while_tracing():
        raise CaptureError(
            "this process was forked while another thread captured a model, and torch's tracer is in the middle of that. "
            "Capture before forking, or start processes with the method 'spawn'."
        )
    export.require_dynamic_shapes(dynamic_shapes)
    model_copy.refuse_scripted(model)
    if not callable(model):
        raise InvalidArgument(f"capture takes a module, a callable or a graph, not a {type(model).__name__}.")
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InvalidArgument(f"capture takes a module, not the class {model.__name__}; make one of it.")
    if calling_convention.loaded_types("Cache"):
        cache_pytrees.register_caches()
    if isinstance(model, nn.Module):
        _refuse_inference_tensors(model)
        model_copy.refuse_distributed(model)
    replays = config.replay_layers
    if replays == "checked":
        replays = is_compared and has_data((args, kwargs), model)
    return _traced(model, args, kwargs, dynamic_shapes, strict, replays=replays)


def _traced(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    strict: bool,
    *,
    replays: bool,
) -> GraphModule:
    trains = torch.is_grad_enabled()
    with outside_inference_mode():
        inputs, keywords = pytree.tree_map(_tracked, (args, dict(kwargs)))
        with pause_gc():
            return _from_model(model, inputs, keywords, dynamic_shapes, strict, trains, replays)


def checked(
    model: Callable[..., Any],
    graph: GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any = None,
    strict: bool = False,
) -> GraphModule:
    """Return a graph of a model, compared with it on these inputs; raise CaptureMismatch if they differ.

    Where repeated layers may have been replayed, a graph that differs, or that cannot be compared, is replaced by one with
    every layer traced.
    """
    reason = "it cannot be compared with the model"
    replayed = graph.meta.pop(REPLAYED, {})
    try:
        if compare_with_model(model, graph, args, kwargs, replayed) or config.replay_layers != "checked":
            return graph
    except CaptureMismatch as mismatch:
        if not config.replay_layers:
            raise
        reason = str(mismatch)
    if not has_data((args, kwargs), model):
        return graph  # nothing was replayed
    _log.info("every layer is traced: %s", reason)
    graph = _traced(model, args, kwargs, dynamic_shapes, strict, replays=False)
    compare_with_model(model, graph, args, kwargs)
    return graph


def compare_with_model(
    model: Callable[..., Any],
    graph: GraphModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    replayed: Mapping[str, str] | None = None,
) -> bool:
    """Raise CaptureMismatch unless a graph does what its model does on these inputs; return whether that was compared.

    `replayed` are the paths of layers that were copied, with those of the layers they were copied from.
    """
    trains = torch.is_grad_enabled()
    with outside_inference_mode():
        inputs, keywords = pytree.tree_map(_tracked, (args, dict(kwargs)))
        with torch.set_grad_enabled(trains):
            return check_against_model(model, graph, inputs, keywords, replayed or {})


def outside_inference_mode() -> AbstractContextManager[Any]:
    """Return a context in which tensors can be traced: leaves the caller's inference mode, and enables gradients then."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def _tracked(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _refuse_inference_tensors(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_inference():
            raise CaptureError(
                f"'{name}' of the model was created in torch.inference_mode(), and such tensors cannot be traced. "
                f"Create or load the model outside of it."
            )


def _checked(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not isinstance(args, (tuple, list)):
        raise InvalidArgument(
            f"args must be a tuple of example inputs, not a {type(args).__name__}. Write (x,) for a single one."
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidArgument(f"kwargs must be a dict of example inputs, not a {type(kwargs).__name__}.")
    return tuple(cast("tuple[Any, ...]", args)), dict(cast("Mapping[str, Any]", kwargs or {}))


def _from_model(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    strict: bool,
    trains: bool,
    replays: bool,
) -> Program:
    signature = model_copy.signature_of(model, len(args), list(kwargs))
    module = model if isinstance(model, nn.Module) else model_copy.as_module(model, signature)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"the example inputs do not fit the model's signature {signature}: {error}."
        ) from error
    _require_dimensions(bound, dynamic_shapes)
    model_copy.refuse_reserved(module)
    try:
        # Another thread may call the model while it is exported.
        copy = structural_copy(module) if module is model else module
        with CAPTURING, tracing():
            exported, effects, replayed = export.export_model(
                copy,
                args,
                kwargs,
                dynamic_shapes,
                strict,
                trains=trains,
                replays=replays and config.replay_layers and copy is not module,
            )
            decomposed = export.decompose(exported)
    except CaptureError as error:
        _refuse_shared_inputs(args, kwargs, error)
        _refuse_shared_state(module, args, kwargs, error)
        raise
    unlifted = unlift(decomposed, model_copy.mirror(module))
    if unlifted.mutated:
        _refuse_shared_inputs(args, kwargs, None)
    captured = _finished(unlifted, decomposed, signature, module.training, effects, trains)
    if replayed:
        captured.meta[REPLAYED] = replayed
    names = _dim_names(bound, dynamic_shapes, (args, kwargs), unlifted.inputs)
    if names:
        captured.meta[DIM_NAMES] = names
    return captured


def _dim_names(
    bound: inspect.BoundArguments, dynamic_shapes: Any, example: Any, inputs: Sequence[Node]
) -> dict[str, str]:
    """Return the names of sizes that have a `torch.export.Dim`, by input and dimension: "x:0"."""
    leaves = pytree.tree_leaves(example)
    if dynamic_shapes is None or len(leaves) != len(inputs):
        return {}
    node_of = {id(leaf): node for leaf, node in zip(leaves, inputs, strict=True)}
    names: dict[str, str] = {}
    for _, tensor, dim, size in _dimensions(bound, dynamic_shapes):
        node, name = node_of.get(id(tensor)), getattr(size, "__name__", None)
        value = node.meta.get("val") if node is not None else None
        if node is None or not isinstance(value, Tensor) or not isinstance(name, str):
            continue
        if isinstance(value.shape[dim], SymInt):
            names[f"{node.name}:{dim % value.dim()}"] = name
    return names


def _dimensions(bound: inspect.BoundArguments, dynamic_shapes: Any) -> Iterator[tuple[str, Tensor, Any, Any]]:
    """Yield each dimension that dynamic shapes have an entry for: the argument, the tensor in it, the dimension, the entry."""
    stack: list[tuple[str, Any, Any]] = [("", dict(bound.arguments), dynamic_shapes)]
    while stack:
        name, value, spec = stack.pop()
        if isinstance(value, Tensor):
            dims: Any = spec.items() if isinstance(spec, Mapping) else ()
            if isinstance(spec, (list, tuple)):
                dims = enumerate(cast("Sequence[Any]", spec))
            yield from ((name, value, dim, size) for dim, size in dims)
        elif isinstance(value, Mapping) and isinstance(spec, Mapping):
            inner = cast("Mapping[Any, Any]", value)
            pairs = cast("Mapping[Any, Any]", spec).items()
            stack.extend((name or str(k), inner[k], s) for k, s in pairs if k in inner)
        elif isinstance(spec, (list, tuple)):
            items: Any = value if isinstance(value, (list, tuple)) else ()
            parts = value.items() if isinstance(value, Mapping) else [(name, part) for part in items]
            entries = zip(cast("Iterable[Any]", parts), cast("Sequence[Any]", spec), strict=False)
            stack.extend((name or str(key), part, entry) for (key, part), entry in entries)


def _require_dimensions(bound: inspect.BoundArguments, dynamic_shapes: Any) -> None:
    """Raise CaptureError for an entry of dynamic shapes that the dimensions of the example inputs contradict."""
    for name, tensor, dim, size in _dimensions(bound, dynamic_shapes) if dynamic_shapes is not None else ():
        what, rank = "dynamic_shapes do not fit the example inputs:", tensor.dim()
        if not isinstance(dim, int) or not -rank <= dim < rank:
            raise CaptureError(f"{what} '{name}' has {rank} dimensions, and none is {dim!r}.")
        actual, low, high = tensor.shape[dim], getattr(size, "min", None), getattr(size, "max", None)
        where = f"dimension {dim} of '{name}' is {actual}"
        if isinstance(size, int) and size != actual:
            raise CaptureError(f"{what} {where}, not {size}. Leave it out, or give a torch.export.Dim.")
        if (low is not None and actual < low) or (high is not None and actual > high):
            raise CaptureError(
                f"{what} {where}, outside of the range of {size}. Widen the range, or give other inputs."
            )


def _from_program(program: ExportedProgram) -> Program:
    decomposed = export.decompose(program)
    unlifted = unlift(decomposed, model_copy.from_program(program, training=True))
    return _finished(
        unlifted, decomposed, model_copy.signature_of_program(program), None, side_effects.SideEffects()
    )


def _finished(
    unlifted: Unlifted,
    exported: export.Exported,
    signature: inspect.Signature,
    training: bool | None,
    effects: side_effects.SideEffects,
    trains: bool = True,
) -> Program:
    captured = unlifted.program
    ungraded, graded = unlifted.ungraded, tuple[str, ...]()
    if effects.function:
        # With the gradients of the example inputs, or none, nothing differentiable reached the function.
        ungraded |= frozenset(range(len(unlifted.inputs))) - (unlifted.graded if trains else frozenset())
        state = (*captured.named_parameters(), *captured.named_buffers())
        graded = tuple(name for name, tensor in state if trains and tensor.requires_grad)
    arrangement = calling_convention.arrange(exported.in_spec, signature)
    input_guards = build_input_guards(
        [node.meta.get("val") for node in unlifted.inputs],
        arrangement.paths,
        unlifted.mutated,
        exported.program.range_constraints,
        export.guards_of(exported.program),
        frozenset(i for i, node in enumerate(unlifted.inputs) if not node.users),
        guarded_state(captured.graph, writes_inputs=bool(unlifted.mutated)),
        ungraded,
        _depends_on_strides(exported, effects),
        effects.function,
        graded,
    )
    convention = Convention(
        arrangement.slots,
        arrangement.spec,
        arrangement.order,
        exported.out_spec,
        input_guards,
        training,
        _carried(arrangement.slots, exported.out_spec, effects.caches),
        effects.appended,
    )
    captured.graph.set_codegen(ModelCodeGen(convention))
    canonical, report = canonicalize(captured)
    canonical.meta[CANONICAL] = report
    return canonical


def _depends_on_strides(exported: export.Exported, effects: side_effects.SideEffects) -> bool:
    """Return whether the model may compute something else for inputs of other strides, and the graph would not."""
    if effects.stride_reads & {"stride", "is_contiguous"}:
        return True
    # torch.export leaves `contiguous` out where it changes nothing for the example inputs.
    targets = {n.target for n in exported.program.graph.nodes if isinstance(n.target, OpOverload)}
    if effects.stride_reads and any(target._schema.name.startswith("aten::as_strided") for target in targets):
        return True
    draws = any(torch.Tag.nondeterministic_seeded in target.tags for target in targets)
    return draws and (exported.draws_in_place or bool(effects.stride_reads))


def _carried(
    slots: tuple[calling_convention.Slot, ...], out_spec: Any, caches: tuple[tuple[str | int, int], ...]
) -> tuple[calling_convention.Carried, ...]:
    names = [slot.name for slot in slots]
    returned = calling_convention.find_caches(out_spec)
    carried: list[calling_convention.Carried] = []
    for cache, place in caches:
        slot = cache if isinstance(cache, int) else names.index(cache) if cache in names else None
        if slot is None or place >= len(returned):
            raise CaptureError(
                "the model updates a cache argument in a way that cannot be traced. "
                "Pass the cache as a parameter of its own, or capture with use_cache=False."
            )
        carried.append(calling_convention.Carried(slot, *returned[place]))
    return tuple(carried)


def _refuse_shared_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], cause: CaptureError | None) -> None:
    """Raise CaptureError if two example inputs share memory, which breaks the tracing of a model that writes to them."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    for i, first in enumerate(leaves):
        for second in leaves[i + 1 :]:
            if overlap(first, second):
                raise CaptureError(
                    f"two example inputs share memory (shapes {tuple(first.shape)} and {tuple(second.shape)}), "
                    f"and the model writes to its inputs. Pass a clone of one of them."
                ) from cause


def _refuse_shared_state(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cause: CaptureError
) -> None:
    """Raise CaptureError if an example input shares memory with the model's state, which breaks tracing writes."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    for name, held in (*module.named_buffers(), *module.named_parameters()):
        if any(overlap(leaf, held) for leaf in leaves):
            raise CaptureError(
                f"an example input shares memory with the model's own '{name}', which cannot be traced where the model "
                f"writes one of them. Pass a clone. ({cause})"
            ) from cause
