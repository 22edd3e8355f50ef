"""Export: from a model and example inputs to a decomposed, functional program that trains as the model does.

`export_model` calls torch.export while side effects are watched, and translates its errors. `decompose` removes writes
and composite operators. Around that step, rewrites keep what functionalization would change; each runs only if the graph
calls an operator that gives it something to do.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import operator
import re
import threading
from collections.abc import Callable, Generator, Mapping
from traceback import walk_tb
from typing import Any, cast

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import TreeSpec, tree_leaves

from dovetail import torch_compat
from dovetail.errors import CaptureError, InvalidArgument
from dovetail.frontend import (
    decompose_program,
    detached_writes,
    export_aliases,
    export_fixups,
    mutation_fixups,
    side_effects,
)
from dovetail.frontend.calling_convention import dict_of, leaf_spec, tuple_of
from dovetail.frontend.decompose_ops import Unsure
from dovetail.frontend.decompose_program import Decomposed
from dovetail.frontend.detached_writes import DetachedInputs
from dovetail.frontend.export_aliases import state_requires_grad
from dovetail.frontend.layer_replay import LayerReplay, LeakedValue
from dovetail.ir import source_location
from dovetail.ir.process_state import defer_torch_output, preserve_rng_state, suppress_torch_warnings

_LEAF = leaf_spec()
_log = logging.getLogger(__name__)

# In torch's errors about dynamic_shapes whose structure differs from that of the inputs.
_MISFITS = ("mismatch between the structure", "top-level keys", "expected dynamic_shapes", "Unexpected")
_SCATTER = torch.ops.aten.as_strided_scatter.default

# Rewrites after decomposition, by the operator that they look for.
_AFTER_DECOMPOSITION: dict[Any, Callable[[Graph], None]] = {
    torch.ops.aten._native_batch_norm_legit_functional.default: export_fixups.choose_kernel_as_eager,
    torch.ops.aten.copy.default: export_fixups.make_differentiable,
    torch.ops.higher_order.auto_functionalized_v2: export_fixups.make_bases_dense,
}
_DATA_DEPENDENT = ("GuardOnDataDependentSymNode", "PendingUnbackedSymbolNotFound")


@dataclasses.dataclass(frozen=True)
class Exported:
    """A decomposed program, how the model is called, and which of its results are its mutated inputs.

    The program itself takes and returns flat tuples; `names`, `in_spec` and `out_spec` are the model's. `aliases` maps the
    position of a result to the name of the placeholder whose storage it shares.
    """

    program: Decomposed
    aliases: Mapping[int, str]
    names: tuple[str, ...]
    in_spec: TreeSpec
    out_spec: TreeSpec
    detached: DetachedInputs
    draws_in_place: bool


def export_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    strict: bool,
    *,
    trains: bool = True,
    replays: bool = False,
) -> tuple[ExportedProgram, side_effects.SideEffects, Mapping[str, str]]:
    """Export `model` in training form; raise CaptureError with the user's line if that fails.

    `forward` of the model may be replaced by an equivalent one. Unless the graph `trains`, it may apply functions whose
    backward formula is lost. With `replays`, repeated layers are replayed; the modules must be a copy that nobody else uses.
    The paths of replayed layers are returned with those of the layers that they were copied from.
    """
    if dynamic_shapes is not None:
        dynamic_shapes = _with_named_parameters(model, args, kwargs, dynamic_shapes)
    with preserve_rng_state(), torch.enable_grad():
        replay = LayerReplay(model) if replays and not strict else None
        copied: Mapping[str, str] = {}
        try:
            with replay.active() if replay is not None else contextlib.nullcontext():
                effects, program = _watched_export(model, args, kwargs, dynamic_shapes, trains)
            copied = replay.copied if replay is not None else copied
        except LeakedValue as leak:
            _log.debug("every layer is traced: %s", leak)
            effects, program = _watched_export(model, args, kwargs, dynamic_shapes, trains)
        if strict:
            # The strict exporter silently drops side effects: the other one detects them.
            if isinstance(program, CaptureError):
                _log.debug("the export that detects side effects for strict mode failed: %s", program)
            program = _export(model, args, kwargs, dynamic_shapes, strict=True)
        if isinstance(program, CaptureError):
            raise _at_data(effects, program) from program
        return program, effects, copied


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, strict: bool
) -> ExportedProgram:
    with defer_torch_output() as noise, _convolutions_of_cudnn(), _deferred_code(), _without_idle_passes():
        try:
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=strict)
        except (InvalidArgument, LeakedValue):
            raise
        except Exception as error:
            raise _translated(error, noise, _called_with(model, args, kwargs, error)) from error


@contextlib.contextmanager
def _convolutions_of_cudnn() -> Generator[None]:
    """Let convolutions have the memory format that cuDNN gives them, if it is enabled.

    torch.export disables cuDNN while it traces; other kernels return contiguous results for inputs in channels last.
    """
    cudnn = torch.backends.cudnn
    if not (cudnn.is_available() and cudnn.enabled):
        yield
        return

    def with_cudnn(select: Callable[..., Any]) -> Callable[..., Any]:
        def selected(*args: Any, **kwargs: Any) -> Any:
            was = torch._C._get_cudnn_enabled()
            torch._C._set_cudnn_enabled(True)
            try:
                return select(*args, **kwargs)
            finally:
                torch._C._set_cudnn_enabled(was)

        return selected

    with torch_compat.patched([(torch_compat.CONV_BACKEND, with_cudnn)]):
        yield


@contextlib.contextmanager
def _deferred_code() -> Generator[None]:
    """Generate the code of graphs that this thread makes or edits when they are called, if ever.

    The exporter has a dozen passes, and each of them would generate the code of the whole graph.
    """
    thread = threading.get_ident()

    def deferring(recompile: Callable[..., Any]) -> Callable[..., Any]:
        def generated(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
            recompile(module)
            return module(*args, **kwargs)

        def deferred(module: GraphModule) -> Any:
            if threading.get_ident() != thread or hasattr(module.graph._codegen, "pytree_info"):
                return recompile(module)
            type(module).forward = generated
            return None

        return deferred

    with torch_compat.patched([(torch_compat.GRAPH_CODE, deferring)]):
        yield


@contextlib.contextmanager
def _without_idle_passes() -> Generator[None]:
    """Skip a pass of the exporter over all values where no size depends on data, so that it would change nothing."""

    def skipping(replace: Callable[..., Any]) -> Callable[..., Any]:
        def replaced(module: GraphModule) -> None:
            if any("unbacked_bindings" in node.meta for node in module.graph.nodes) or _has_unbacked(module):
                replace(module)

        return replaced

    with torch_compat.patched([(torch_compat.UNBACKED_BINDINGS, skipping)]):
        yield


def _has_unbacked(module: GraphModule) -> bool:
    """Return whether an unbacked symbol may be among the sizes of a program."""
    for node in module.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode.shape_env is not None and bool(mode.shape_env.var_to_range)
    return True


def require_dynamic_shapes(dynamic_shapes: Any) -> None:
    """Raise InvalidArgument unless it is of a type that torch.export accepts."""
    known = ("ShapesCollection", "AdditionalInputs")
    if dynamic_shapes is None or isinstance(dynamic_shapes, (Mapping, tuple, list)):
        return
    if type(dynamic_shapes).__name__ not in known:
        raise InvalidArgument(
            f"dynamic_shapes {dynamic_shapes!r}; give the dimensions of each argument, as torch.export takes them: "
            f"{{'x': {{0: torch.export.Dim('batch')}}}}, or torch.export.Dim.AUTO in the place of a Dim. "
            f"`dovetail.compile(model, dynamic=True)` makes all sizes dynamic."
        )


def _called_with(model: nn.Module, args: Any, kwargs: Any, error: Exception) -> str:
    """Return a description of the example inputs and of the module in whose forward an error was raised."""
    leaves = tree_leaves((args, kwargs))
    shown = ", ".join(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)[:40]
        for leaf in leaves[:8]
    )
    inner: Any = None
    for frame, _ in walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(owner, nn.Module):
            inner = owner
    path = next((name for name, module in model.named_modules() if module is inner), "")
    where = f" in '{path}' ({type(inner).__name__})" if path else ""
    return f" with the inputs ({shown}{', ...' if len(leaves) > 8 else ''}){where}"


def _with_named_parameters(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> Any:
    """Add a parameter to forward for each argument that it takes by `**kwargs`, and return dynamic_shapes for that.

    torch.export has such arguments twice when it derives the ranges of sizes, under their own names and under that of
    the parameter that collects them, and fails.
    """
    signature = inspect.signature(model.forward)
    collecting = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    arguments = signature.bind(*args, **kwargs).arguments
    extra = arguments.get(collecting[0].name, {}) if collecting else {}
    if not extra:
        return dynamic_shapes
    named = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extra]
    others = [p for p in signature.parameters.values() if p is not collecting[0]]
    forward = model.forward

    @functools.wraps(forward)
    def with_named_parameters(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    cast("Any", with_named_parameters).__signature__ = inspect.Signature([*others, *named])
    model.forward = with_named_parameters
    if not isinstance(dynamic_shapes, Mapping):
        return dynamic_shapes
    shapes = dict(cast("Mapping[str, Any]", dynamic_shapes))
    return shapes | dict(shapes.pop(collecting[0].name, None) or dict.fromkeys(extra))


def _at_data(effects: side_effects.SideEffects, failure: CaptureError) -> CaptureError:
    if effects.data_line is None or "\n  at " in str(failure):
        return failure
    what = "forward uses `.data`, which torch.export cannot trace here"
    return CaptureError(
        source_location.located(what, effects.data_line, f"Use detach() instead. ({failure})")
    )


def _watched_export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, trains: bool
) -> tuple[side_effects.SideEffects, ExportedProgram | CaptureError]:
    """Export in non-strict mode; raise CaptureError for side effects, which explain a failure better than its error."""
    with side_effects.watched(model, trains=trains) as effects:
        try:
            program = _export(model, args, kwargs, dynamic_shapes, strict=False)
        except CaptureError as error:
            program = error
    effects.refuse()
    return effects, program


def decompose(program: ExportedProgram) -> Exported:
    """Return the functional form of an exported program, in which no_grad blocks still have no gradients.

    Edits the program; `own` returns one that may be edited.
    """
    with suppress_torch_warnings(), preserve_rng_state(), torch.enable_grad(), _deferred_code():
        targets = _targets(program.graph_module)
        writes = any(isinstance(target, OpOverload) and target._schema.is_mutable for target in targets)
        if writes:
            mutation_fixups.refuse_resizing(program)
        if targets & export_aliases.MAYBE_IDENTITIES:
            export_aliases.remove_identities(program)
            export_fixups.multiply_dropped(program)
        if writes:
            export_aliases.keep_old_values(program)
        aliases = (
            export_aliases.aliased_results(program) if writes or _updates_state(program, targets) else {}
        )
        if any(getattr(target, "__name__", "") == export_fixups.GRAD_MODE_BLOCK for target in targets):
            export_fixups.flatten_no_grad(program)
        detached, draws_in_place = _requiring_gradients(program), False
        if writes:
            mutation_fixups.keep_strides(program.graph)
            draws_in_place = mutation_fixups.draw_into_fresh_memory(program)
            export_fixups.keep_histories(program)
            detached = detached_writes.separate(program, detached)
            mutation_fixups.call_functional_forms(program.graph)
        _rename_results(program)
        in_spec, out_spec = program.call_spec.in_spec, program.call_spec.out_spec
        if in_spec is None or out_spec is None:
            raise CaptureError(
                "the exported program has no specs of its inputs and results. Export it again."
            )
        signature = _with_results(program, _unused_draws(program.graph))
        names = _input_names(program)
        with _effects_kept(program.graph):
            try:
                decomposed = decompose_program.decomposed(program, signature)
            except Unsure as reason:
                _log.debug("torch retraces the program to decompose it: %s", reason)
                decomposed = retraced(program, signature)
        targets = {node.target for node in decomposed.graph.nodes}
        if _SCATTER in targets:
            detached_writes.refuse_strided_scatters(decomposed.graph, state_requires_grad(program))
        if writes:
            mutation_fixups.call_originals(decomposed.graph)
        for target, fixup in _AFTER_DECOMPOSITION.items():
            if target in targets:
                fixup(decomposed.graph)
        if draws_in_place:
            mutation_fixups.draw_in_place(decomposed.graph)
        return Exported(decomposed, aliases, names, in_spec, out_spec, detached, draws_in_place)


def _targets(module: GraphModule) -> set[Any]:
    """Return what the graph and the graphs of its blocks and branches call."""
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, GraphModule)]
    return {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}


def _updates_state(program: ExportedProgram, targets: set[Any]) -> bool:
    """Return whether decomposition may return new values of inputs or buffers though no schema declares a write."""
    if any("MUTATION" in spec.kind.name for spec in program.graph_signature.output_specs):
        return True
    overloads = [target for target in targets if isinstance(target, OpOverload)]
    return any(isinstance(target, HigherOrderOperator) for target in targets) or any(
        argument.name == "running_mean" for target in overloads for argument in target._schema.arguments
    )


def _requiring_gradients(program: ExportedProgram) -> DetachedInputs:
    placeholders = program.graph.find_nodes(op="placeholder")
    return DetachedInputs(
        graded=frozenset(n.name for n in placeholders if getattr(n.meta.get("val"), "requires_grad", False))
    )


def retraced(program: ExportedProgram, signature: ExportGraphSignature) -> Decomposed:
    """Return the program as torch itself decomposes it."""
    _remove_boolean_casts(program.graph)
    flat = _called_flat(program, signature)
    with defer_torch_output() as noise:
        try:
            new = flat.run_decompositions({})
        except Exception as error:
            raise _translated(error, noise) from error
    return Decomposed(
        new.graph, new.graph_signature, new.graph_module, new.constants, dict(new.range_constraints)
    )


def _remove_boolean_casts(graph: Graph) -> None:
    """Use the condition itself where it is cast to an integer and compared with 1: torch 2.11 cannot retrace that."""
    for node in graph.find_nodes(op="call_function", target=operator.eq):
        cast_node, one = node.args
        name = getattr(cast_node.target, "__name__", "") if isinstance(cast_node, Node) else ""
        if name == "cast_symbool_to_symint_guardless" and one == 1:
            node.replace_all_uses_with(cast("Node", cast("Node", cast_node).args[0]))
            graph.erase_node(node)


@contextlib.contextmanager
def _effects_kept(graph: Graph) -> Generator[None]:
    """Keep operators that return nothing during dead code elimination: they are called for an effect."""
    known: set[Any] | None = torch_compat.EFFECTFUL_TARGETS.value
    without_result = {
        n.target for n in graph.nodes if isinstance(n.target, OpOverload) and not n.target._schema.returns
    }
    if not isinstance(known, set):
        torch_compat.EFFECTFUL_TARGETS.report()
        yield
        return
    added = without_result - known
    known.update(added)
    try:
        yield
    finally:
        known.difference_update(added)


def _input_names(program: ExportedProgram) -> tuple[str, ...]:
    nodes = program.graph.find_nodes(op="placeholder")
    specs = program.graph_signature.input_specs
    return tuple(n.name for n, spec in zip(nodes, specs, strict=True) if spec.kind.name == "USER_INPUT")


def own(program: ExportedProgram) -> ExportedProgram:
    """Return a program with the same parameters and a copy of the graph, which may be edited."""
    module = copy.deepcopy(program.graph_module)
    for new, old in zip(module.graph.nodes, program.graph_module.graph.nodes, strict=True):
        # A copy renames what has the name of a builtin, say `input`; the signature has the old name.
        if new.name != old.name:
            new.name = old.name
    return _with_graph(program, module, copy.deepcopy(program.graph_signature), program.module_call_graph)


def _unused_draws(graph: Graph) -> list[Node]:
    """Return random draws that are not used; decomposition would drop them, which changes all later draws."""
    alive: set[Node] = {graph.output_node()}
    draws: list[Node] = []
    for node in reversed(list(graph.nodes)):
        # What is written may not be read either, so that a write alone keeps nothing alive.
        if node not in alive:
            if not mutation_fixups.is_random(node):
                continue
            draws.append(node)
        alive.update(node.all_input_nodes)
    tensors: list[Node] = []
    for draw in reversed(draws):
        value = draw.meta.get("val")
        if isinstance(value, (list, tuple)):
            with graph.inserting_after(draw):
                first = graph.call_function(operator.getitem, (draw, 0))
            first.meta = {**draw.meta, "val": value[0]}
            draw = first
        tensors.append(draw)
    return tensors


def _rename_results(program: ExportedProgram) -> None:
    """Update the names of results in the signature to those of the nodes."""
    results = cast("tuple[Any, ...]", program.graph.output_node().args[0])
    for spec, result in zip(program.graph_signature.output_specs, results, strict=True):
        if isinstance(result, Node) and not isinstance(spec.arg, ConstantArgument):
            spec.arg = dataclasses.replace(spec.arg, name=result.name)


def _with_results(program: ExportedProgram, nodes: list[Node]) -> ExportGraphSignature:
    """Let the graph return more nodes, after all others, and return the signature of that."""
    signature = program.graph_signature
    if not nodes:
        return signature
    output = program.graph.output_node()
    output.args = ((*cast("tuple[Any, ...]", output.args[0]), *nodes),)
    extra = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=n.name), None) for n in nodes]
    return ExportGraphSignature(
        input_specs=signature.input_specs, output_specs=[*signature.output_specs, *extra]
    )


def _called_flat(program: ExportedProgram, signature: ExportGraphSignature) -> ExportedProgram:
    """Return the same program with flat inputs and results, so that no class of the user is flattened on retracing."""
    inputs = tuple_of([_LEAF] * len(signature.user_inputs))
    outputs = tuple_of([_LEAF] * len(signature.user_outputs))
    call = ModuleCallSignature(
        inputs=[], outputs=[], in_spec=tuple_of([inputs, dict_of([], [])]), out_spec=outputs
    )
    return _with_graph(program, program.graph_module, signature, [ModuleCallEntry(fqn="", signature=call)])


def _with_graph(
    program: ExportedProgram,
    module: GraphModule,
    signature: ExportGraphSignature,
    calls: list[ModuleCallEntry],
) -> ExportedProgram:
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=dict(program.range_constraints),
        module_call_graph=calls,
        example_inputs=None,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _translated(error: Exception, noise: list[str], called: str = "") -> CaptureError:
    if isinstance(error, CaptureError):
        return error
    kind = type(error).__name__
    text = str(error)
    line = source_location.of_exception(error)
    if kind in _DATA_DEPENDENT or "data-dependent" in text:
        what = "the model branches on, or takes a size from, values that are known only when it runs"
        advice = (
            "Use torch.cond or torch.where for a choice, torch.while_loop for a loop, and torch._check to "
            "promise a range of sizes."
        )
    elif kind == "UnsupportedOperatorException" or "no fake impl" in text:
        what = f"the operator {_operator_in(text)} has no fake kernel, which gives shapes and dtypes of its results without running it"
        advice = (
            "Register one: torch.library.register_fake(name, function), where the function takes the same arguments and "
            "returns empty tensors of the right shape, dtype and strides."
        )
    elif "output has alias annotations" in text:
        what = f"the operator {_operator_in(text)} returns a view of an operand, which a functional graph cannot hold"
        advice = (
            "Return a clone and leave the alias annotation out of the schema, or use views of torch itself."
        )
    elif "dynamic_shapes" in text and any(word in text for word in _MISFITS):
        what = f"dynamic_shapes do not fit the example inputs: {_first_lines(text, 4)}"
        advice = "Give one entry for each argument, of the structure that it has."
    elif kind == "ConstraintViolationError" and "not in range" in text:
        what = f"a size of the inputs is not in the range that dynamic_shapes gives: {_first_lines(text, 2)}"
        advice = "Widen the range (`min` and `max` of the Dim), or leave it out."
    elif "Constraints violated" in text or "dynamic_shapes" in text or "Dim." in text:
        what = f"the model does not support all of the dynamic sizes requested: {_first_lines(text, 12)}"
        advice = "Narrow dynamic_shapes as suggested, or mark the dimension static."
    else:
        what = f"torch.export cannot trace this model{called}: {kind}: {_first_lines(text, 6)}"
        then = "rewrite the line above, or try strict=True" if line is not None else "try strict=True"
        advice = f"Check that the model itself runs on these inputs; if it does, {then}."
    for part in filter(str.strip, noise):
        _log.debug("torch logged while the export failed: %s", part)
    return CaptureError(source_location.located(what, line, advice))


def _operator_in(text: str) -> str:
    """Return the name of the first operator in a message of torch."""
    name = re.search(r"\w+::[\w.]+|\w+\.\w+(\.\w+)?", text)
    return text if name is None else f"'{name[0]}'"


def _first_lines(text: str, most: int) -> str:
    cut = text.split("\nThe error above occurred when calling")[0].strip()
    return "\n    ".join(cut.splitlines()[:most])


def guards_of(program: Decomposed) -> list[Any]:
    """Return the guards on symbolic sizes that the exporter added, beyond their ranges, as sympy conditions."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        mode = getattr(value, "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return [guard.expr for guard in mode.shape_env.guards]
    return []
