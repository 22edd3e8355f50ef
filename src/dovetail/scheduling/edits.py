"""Edits of the graph of a part: each resolves the addresses of its targets and applies a pass, or the function under it.

Targets are addressed by finder and occurrence, so that an edit can be applied again to another capture of the part.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from dovetail.errors import ScheduleError
from dovetail.ir.effects import effects_of
from dovetail.ir.graph_module import copy_graph, rebuild
from dovetail.ir.meta_keys import LOWERING
from dovetail.ir.nodes import is_projection
from dovetail.lowering.backend_protocol import Answer, Backend, Compiled
from dovetail.lowering.lower import lower_with
from dovetail.lowering.options import Options
from dovetail.outlining.inline import inline_named
from dovetail.outlining.outline import Request, outline
from dovetail.outlining.region import Region, call_of, make_identity, regions, walk, write_call
from dovetail.rules.rule import Decline, RuleContext
from dovetail.scheduling.call_recording import RecordedCall, isolated_run
from dovetail.scheduling.decompose import decompose_nodes, has_formula
from dovetail.scheduling.finders import ByRegion, Finder, PartMatch, relative_path
from dovetail.scheduling.replacement_checks import Replacement, with_call


class Checkpoint(Backend):
    """Recomputes the inner values of a body in backward instead of saving them, with `torch.utils.checkpoint`."""

    name = "checkpoint"
    version = "1"
    trains = True
    double_backward = True

    def supports(self, region: Region) -> Answer:
        if any(word != "random" for word in region.effects):
            return Decline(f"it has effects ({', '.join(region.effects)}) that would happen twice")
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        body = region.body

        def run(*operands: Any) -> Any:
            return checkpoint(body, *operands, use_reentrant=False)

        return run


def recompute_conflicts(gm: GraphModule, names: Iterable[str]) -> dict[str, str]:
    """Return the regions that would be recomputed from other numbers, as an operand is written later, with the reason."""
    nodes = {node.name: node for node in gm.graph.nodes}
    written = {w for node in gm.graph.nodes for w in effects_of(node, gm).writes}
    conflicts: dict[str, str] = {}
    for name in names:
        read = [source.name for source in nodes[name].all_input_nodes if source in written]
        if read:
            conflicts[name] = (
                f"it reads '{read[0]}', which is written later, so that it would be recomputed from other numbers. "
                f"Leave that out of the region"
            )
    return conflicts


def require_recomputable(path: str, module: nn.Module, calls: Iterable[RecordedCall]) -> None:
    """Raise if a module writes anything when it is trained: recomputing it would write that twice."""
    if type(module).forward is nn.Module.forward:
        raise ScheduleError(
            f"'{path}' is a {type(module).__name__} and is never called itself; checkpoint the modules in it: '{path}.*'"
        )
    written = [name for call in calls for name in _written_by(module, call)] or _running_statistics(module)
    if written:
        raise ScheduleError(
            f"'{path or 'the model'}' cannot be checkpointed: it writes {', '.join(dict.fromkeys(written))}, which would "
            f"happen twice. Checkpoint the modules around that"
        )


def _running_statistics(module: nn.Module) -> list[str]:
    """Return the running statistics of norms, which are written in training whatever the present mode."""
    norms = (
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)
    )
    return [f"'{name}.running_mean'".replace("'.", "'") for name, part in norms if part.track_running_stats]


def _written_by(module: nn.Module, call: RecordedCall) -> list[str]:
    """Return what one run of a module writes: buffers, parameters or arguments."""
    example = call.example.copied()
    state = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    watched: list[tuple[str, Tensor, int]] = [(f"'{n}'", value, value._version) for n, value in state.items()]
    tensors = [
        leaf for leaf in pytree.tree_leaves((example.args, example.kwargs)) if isinstance(leaf, Tensor)
    ]
    watched += [(f"argument {i}", value, value._version) for i, value in enumerate(tensors)]
    with isolated_run(module), torch.no_grad():
        example.call(module.forward)
        replaced = [f"'{name}'" for name, value in module.named_buffers() if state.get(name) is not value]
        return [name for name, value, version in watched if value._version != version] + replaced


ContextProvider = Callable[[GraphModule], RuleContext]
REQUIRED = Options(smallest=1, on_error="raise")
"""How the regions of a step are lowered: it is an error if no requested backend takes one."""
OPTIONAL = Options(smallest=1)
"""How regions are lowered again, in another graph or for another call, where a backend may decline them."""


@dataclass(frozen=True, eq=False)
class PartGraph:
    """The graph of a part, and the backends requested for its regions by name."""

    gm: GraphModule
    backends: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def with_lowered(self, requested: Mapping[str, Any], options: Options) -> PartGraph:
        """Return the part with these regions lowered too; with strict options each must be accepted by a backend."""
        names = {region.name for region in regions(self.gm)}
        backends = {name: b for name, b in {**self.backends, **requested}.items() if name in names}
        gm = lower_with(self.gm, backends or [], options, progress=False, whole=False)
        for region in regions(gm) if options.strict else ():
            if region.name in requested and region.backend is None:
                refusals = [e for e in gm.meta[LOWERING].events if e.region == region.name and e.reason]
                why = "no backend took it"
                if refusals:
                    why = f"'{refusals[-1].backend}' does not take it: {refusals[-1].reason}"
                raise ScheduleError(f"region '{region.name}' is not lowered: {why}")
        return PartGraph(gm, backends)

    def with_graph(self, gm: GraphModule) -> PartGraph:
        """Return the part with another graph, its regions lowered as before."""
        return PartGraph(gm, self.backends).with_lowered({}, OPTIONAL) if self.backends else PartGraph(gm)


EditResult = tuple[PartGraph, list[str]]
"""The graph after an edit, and the names of the regions it created or changed."""


@dataclass(frozen=True)
class Address:
    """One of the matches of a finder in the part at `path`."""

    path: str
    finder: Finder
    occurrence: int

    def resolve(
        self, context: RuleContext, root: str, cache: dict[Any, tuple[list[PartMatch], str]]
    ) -> PartMatch:
        """Return the match in the graph of the traced part at `root`; `cache` holds the matches of other addresses."""
        key = (self.path, self.finder.identity)
        if key not in cache:
            cache[key] = self.finder.find(context, relative_path(self.path, root))
        matches, why = cache[key]
        if self.occurrence >= len(matches):
            raise ScheduleError(
                f"match number {self.occurrence} of {self.finder.name} does not exist: {why or f'there are {len(matches)}'}"
            )
        return matches[self.occurrence]


@dataclass(frozen=True, eq=False)
class Edit(ABC):
    """One change of the graph of the traced part at `root`; `form` is the number of the call signature."""

    root: str
    form: int
    targets: tuple[Address, ...]

    def apply(
        self, part: PartGraph, root: str, contexts: ContextProvider, options: Options = REQUIRED
    ) -> EditResult:
        """Apply the edit to the graph of the traced part at `root`, which may by now be a module around its own."""
        context = contexts(part.gm)
        cache: dict[Any, tuple[list[PartMatch], str]] = {}
        matches = [target.resolve(context, root, cache) for target in self.targets]
        return self._edited(part, matches, options)

    @abstractmethod
    def _edited(self, part: PartGraph, matches: list[PartMatch], options: Options) -> EditResult:
        """Return what `apply` does, for the matches at the addresses of the targets."""

    def copied_with(self, memo: dict[int, Any]) -> Edit:
        """Return the edit for a copy of the model."""
        return self


@dataclass(frozen=True, eq=False)
class FuseEdit(Edit):
    """Outline matches as regions, one each or all in one."""

    kind: str | None = None
    version: int | None = None
    attrs: Mapping[str, Any] | None = None
    escapes: Any = None
    together: bool = False
    backend: Any = None

    def _edited(self, part: PartGraph, matches: list[PartMatch], options: Options) -> EditResult:
        requests = [self._request(m) for m in matches]
        if self.together:
            nodes = tuple(dict.fromkeys(n for m in matches for n in m.nodes))
            requests = [replace(requests[0], nodes=nodes, arguments=None, results=(), rule=None)]
        gm, names = outline_named(part.gm, requests)
        if self.backend is None:
            return part.with_graph(gm), names
        requested = dict.fromkeys(names, self.backend)
        return PartGraph(gm, part.backends).with_lowered(requested, options), names

    def _request(self, match: PartMatch) -> Request:
        base = match.request
        assert base is not None
        return replace(
            base,
            kind=self.kind or base.kind,
            version=base.version if self.version is None else self.version,
            attrs=base.attrs if self.attrs is None else {**(base.attrs or {}), **self.attrs},
            escapes=base.escapes if self.escapes is None else self.escapes,
        )


def outline_named(gm: GraphModule, requests: list[Request]) -> tuple[GraphModule, list[str]]:
    """Outline requests and return the graph and the name of the region of each."""
    outlined = outline(gm, requests)
    owner: dict[str, str] = {}
    before = {node.name for node in gm.graph.nodes}
    for node in outlined.graph.nodes:
        call = call_of(node.meta)
        if call is not None and node.name not in before:
            owner.update({member.name: node.name for member in walk(call) if not member.clone})
    names = [next(owner[n.name] for n in r.nodes if n.name in owner) for r in requests]  # pyright: ignore
    return outlined, names


@dataclass(frozen=True, eq=False)
class ReplaceEdit(Edit):
    """Call a replacement in place of matches."""

    new: Replacement | None = None

    def _edited(self, part: PartGraph, matches: list[PartMatch], options: Options) -> EditResult:
        assert self.new is not None
        gm, region = isolate(part.gm, matches)
        gm = with_call(gm, region, self.new.adapter(matches, region), self.new.name)
        return part.with_graph(gm), [region.name]

    def copied_with(self, memo: dict[int, Any]) -> Edit:
        if self.new is None or not isinstance(self.new.new, nn.Module):
            return self
        return replace(self, new=replace(self.new, new=copy.deepcopy(self.new.new, memo)))


def isolate(gm: GraphModule, matches: list[PartMatch]) -> tuple[GraphModule, Region]:
    """Outline the operations of matches as one region, unless they are a region already."""
    first = matches[0]
    request = first.request
    assert request is not None
    if isinstance(first.finder, ByRegion) and len(matches) == 1:
        name = first.nodes[0].name
    else:
        nodes = tuple(dict.fromkeys(n for m in matches for n in m.nodes))
        if len(matches) > 1:
            results = tuple(o for m in matches for o in m.outputs)
            request = replace(request, arguments=None, results=results, rule=None)
        elif not request.results:
            request = replace(request, results=first.outputs)
        gm, names = outline_named(gm, [replace(request, nodes=nodes, kind="replaced", attrs=None)])
        name = names[0]
    return gm, next(r for r in regions(gm) if r.name == name)


@dataclass(frozen=True, eq=False)
class DecomposeEdit(Edit):
    """Inline regions, and decompose operations into simpler ones."""

    def _edited(self, part: PartGraph, matches: list[PartMatch], options: Options) -> EditResult:
        gm = part.gm
        closed = [m.nodes[0].name for m in matches if isinstance(m.finder, ByRegion)]
        if closed:
            gm = inline_named(gm, closed, depth=1)
        operations = [
            name for m in matches if not isinstance(m.finder, ByRegion) for name in self._decomposable(m)
        ]
        if operations:
            gm = decompose_nodes(gm, operations)
        return part.with_graph(gm), []

    @staticmethod
    def _decomposable(match: PartMatch) -> list[str]:
        """Return the operation of a match, or those of its operations that have a formula."""
        nodes = [n for n in match.nodes if not is_projection(n)]
        if len(nodes) == 1:
            return [nodes[0].name]
        names = [n.name for n in nodes if has_formula(n)]
        if not names:
            raise ScheduleError(f"no operation of {match!r} can be decomposed into simpler ones")
        return names


@dataclass(frozen=True, eq=False)
class AnnotateEdit(Edit):
    """Add attributes to regions."""

    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def _edited(self, part: PartGraph, matches: list[PartMatch], options: Options) -> EditResult:
        names = [m.nodes[0].name for m in matches]
        by_name = {region.name: region for region in regions(part.gm)}
        graph = copy_graph(part.gm.graph)
        for node in graph.nodes:
            call = call_of(node.meta)
            if call is not None and node.name in names:
                region = by_name[node.name]
                identity = make_identity(region.kind, region.version, {**region.attrs, **self.attrs})
                write_call(node, replace(call, identity=identity))
        return part.with_graph(rebuild(part.gm, graph)), names


@dataclass(frozen=True, eq=False)
class LowerEdit(Edit):
    """Lower regions to a backend."""

    backend: Any = None

    def _edited(self, part: PartGraph, matches: list[PartMatch], options: Options) -> EditResult:
        names = [m.nodes[0].name for m in matches]
        conflicts = recompute_conflicts(part.gm, names) if isinstance(self.backend, Checkpoint) else {}
        requested = {n: self.backend for n in names if options.strict or n not in conflicts}
        lowered = part.with_lowered(requested, options)
        for name, why in conflicts.items() if options.strict else ():
            raise ScheduleError(f"region '{name}' cannot be checkpointed: {why}")
        return lowered, names
