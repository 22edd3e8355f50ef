"""Edits of one part's graph, addressed by what they are about, so that they can be done again on another capture."""

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
from dovetail.outlining.outline import outline
from dovetail.outlining.region import Region, regions
from dovetail.outlining.region_call import call_of, make_identity, walk, write_call
from dovetail.outlining.request import Request
from dovetail.rules.rule import Decline, RuleContext
from dovetail.scheduling.call_recording import RecordedCall, undisturbed
from dovetail.scheduling.decompose import can_be_taken_apart, decomposed
from dovetail.scheduling.finders import ByRegion, Finder, PartMatch, below
from dovetail.scheduling.replacement_checks import Replacement, with_replacement


class Checkpoint(Backend):
    """Runs a body and keeps none of its inner values for backward: they are computed again, by torch's own means."""

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


def not_repeatable(gm: GraphModule, names: Iterable[str]) -> dict[str, str]:
    """Which regions of a graph would be computed again from other numbers, and why: what they read is written later."""
    nodes = {node.name: node for node in gm.graph.nodes}
    written = {w for node in gm.graph.nodes for w in effects_of(node, gm).writes}
    found: dict[str, str] = {}
    for name in names:
        read = [source.name for source in nodes[name].all_input_nodes if source in written]
        if read:
            found[name] = (
                f"it reads '{read[0]}', which is written later, so that it would be computed again from other numbers. "
                f"Leave that out of the region"
            )
    return found


def require_repeatable(path: str, module: nn.Module, calls: Iterable[RecordedCall]) -> None:
    """Raise if a module does more than compute: what it writes when it is trained would be written twice."""
    if type(module).forward is nn.Module.forward:
        raise ScheduleError(
            f"'{path}' is a {type(module).__name__} and is never called itself; checkpoint the modules in it: '{path}.*'"
        )
    written = [name for call in calls for name in _written(module, call)] or _statistics(module)
    if written:
        raise ScheduleError(
            f"'{path or 'the model'}' cannot be checkpointed: it writes {', '.join(dict.fromkeys(written))}, which would "
            f"happen twice. Checkpoint the modules around that"
        )


def _statistics(module: nn.Module) -> list[str]:
    """Running statistics of norms, which are written in training whatever mode the module is in now."""
    norms = (
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)
    )
    return [f"'{name}.running_mean'".replace("'.", "'") for name, part in norms if part.track_running_stats]


def _written(module: nn.Module, call: RecordedCall) -> list[str]:
    """What one run of a module changed: buffers, parameters, or what it was given."""
    example = call.example.copied()
    state = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    watched: list[tuple[str, Tensor, int]] = [(f"'{n}'", value, value._version) for n, value in state.items()]
    given = [leaf for leaf in pytree.tree_leaves((example.args, example.kwargs)) if isinstance(leaf, Tensor)]
    watched += [(f"argument {i}", value, value._version) for i, value in enumerate(given)]
    with undisturbed(module), torch.no_grad():
        example.call(module.forward)
        replaced = [f"'{name}'" for name, value in module.named_buffers() if state.get(name) is not value]
        return [name for name, value, version in watched if value._version != version] + replaced


Look = Callable[[GraphModule], RuleContext]


@dataclass(frozen=True, eq=False)
class PartGraph:
    """The graph of a part as it is now, and the backends that were asked for by region."""

    gm: GraphModule
    backends: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def lowered(self, wanted: Mapping[str, Any], *, strict: bool) -> PartGraph:
        """The same with these regions lowered too."""
        here = {region.name for region in regions(self.gm)}
        backends = {name: b for name, b in {**self.backends, **wanted}.items() if name in here}
        options = Options(smallest=1, on_error="raise" if strict else "fallback")
        gm = lower_with(self.gm, backends or [], options, progress=False, whole=False)
        return PartGraph(gm, backends)

    def changed(self, gm: GraphModule) -> PartGraph:
        """Another graph, its regions lowered as they were."""
        return PartGraph(gm, self.backends).lowered({}, strict=False) if self.backends else PartGraph(gm)


@dataclass(frozen=True)
class Address:
    """Which of the matches of a finder in the part at `path`."""

    path: str
    finder: Finder
    occurrence: int

    def all(self, context: RuleContext, root: str) -> list[PartMatch]:
        """Every match of the finder in the part, in the graph of the traced part at `root`."""
        return self.finder.find(context, below(self.path, root))[0]

    def resolve(
        self, context: RuleContext, root: str, known: dict[Any, tuple[list[PartMatch], str]] | None = None
    ) -> PartMatch:
        """The match that is meant; `known` remembers what finders found for other addresses in the same graph."""
        key = (self.path, self.finder.identity)
        remembered = {} if known is None else known
        if key not in remembered:
            remembered[key] = self.finder.find(context, below(self.path, root))
        found, why = remembered[key]
        if self.occurrence >= len(found):
            raise ScheduleError(
                f"there is no match number {self.occurrence} of {self.finder.name}: {why or f'{len(found)} were found'}"
            )
        return found[self.occurrence]


@dataclass(frozen=True, eq=False)
class Edit(ABC):
    """One change of the graph of the traced part at `root`; `form` is the call signature it was made for."""

    root: str
    form: int
    targets: tuple[Address, ...]

    @abstractmethod
    def apply(self, part: PartGraph, root: str, look: Look) -> tuple[PartGraph, list[str]]:
        """The graph after it, and the names of the regions it made or changed.

        `root` is the path of what the graph is of, which may by now be a module around the one it was made for.
        """

    def again(self, part: PartGraph, root: str, look: Look) -> PartGraph:
        """The graph after it, on a capture for another call: what a backend does not take there runs as it is."""
        return self.apply(part, root, look)[0]

    def copied(self, memo: dict[int, Any]) -> Edit:
        """The edit for a copy of the model."""
        return self

    def _matches(self, part: PartGraph, root: str, look: Look) -> list[PartMatch]:
        context = look(part.gm)
        known: dict[Any, tuple[list[PartMatch], str]] = {}
        return [target.resolve(context, root, known) for target in self.targets]


@dataclass(frozen=True, eq=False)
class FuseEdit(Edit):
    """Matches made regions, each by itself or all in one."""

    kind: str | None = None
    version: int | None = None
    attrs: Mapping[str, Any] | None = None
    escapes: Any = None
    together: bool = False
    backend: Any = None

    def apply(self, part: PartGraph, root: str, look: Look) -> tuple[PartGraph, list[str]]:
        return self._fused(part, root, look, strict=True)

    def again(self, part: PartGraph, root: str, look: Look) -> PartGraph:
        return self._fused(part, root, look, strict=False)[0]

    def _fused(self, part: PartGraph, root: str, look: Look, *, strict: bool) -> tuple[PartGraph, list[str]]:
        found = self._matches(part, root, look)
        requests = [self._request(m) for m in found]
        if self.together:
            nodes = tuple(dict.fromkeys(n for m in found for n in m.nodes))
            requests = [replace(requests[0], nodes=nodes, arguments=None, results=(), rule=None)]
        gm, names = outlined(part.gm, requests)
        made = PartGraph(gm, part.backends)
        if self.backend is not None or part.backends:
            wanted = {} if self.backend is None else dict.fromkeys(names, self.backend)
            made = made.lowered(wanted, strict=strict and bool(wanted))
            if strict:
                require_lowered(made, wanted)
        return made, names

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


def outlined(gm: GraphModule, requests: list[Request]) -> tuple[GraphModule, list[str]]:
    """The graph with regions for some requests, and the name of each one's."""
    made = outline(gm, requests)
    owner: dict[str, str] = {}
    before = {node.name for node in gm.graph.nodes}
    for node in made.graph.nodes:
        call = call_of(node.meta)
        if call is not None and node.name not in before:
            owner.update({member.name: node.name for member in walk(call) if not member.clone})
    names = [next(owner[n.name] for n in r.nodes if n.name in owner) for r in requests]  # pyright: ignore
    return made, names


@dataclass(frozen=True, eq=False)
class ReplaceEdit(Edit):
    """Matches, one after the other or all as one, called as something else."""

    new: Replacement | None = None

    def apply(self, part: PartGraph, root: str, look: Look) -> tuple[PartGraph, list[str]]:
        assert self.new is not None
        found = self._matches(part, root, look)
        gm, region = isolated(part.gm, found)
        return part.changed(with_replacement(gm, found, region, self.new)), [region.name]

    def copied(self, memo: dict[int, Any]) -> Edit:
        if self.new is None or not isinstance(self.new.new, nn.Module):
            return self
        return replace(self, new=replace(self.new, new=copy.deepcopy(self.new.new, memo)))


def isolated(gm: GraphModule, found: list[PartMatch]) -> tuple[GraphModule, Region]:
    """The graph with the operations of matches as one region, which a single match of a region is already."""
    first = found[0]
    request = first.request
    assert request is not None
    if isinstance(first.finder, ByRegion) and len(found) == 1:
        name = first.nodes[0].name
    else:
        nodes = tuple(dict.fromkeys(n for m in found for n in m.nodes))
        if len(found) > 1:
            results = tuple(o for m in found for o in m.outputs)
            request = replace(request, arguments=None, results=results, rule=None)
        elif not request.results:
            request = replace(request, results=first.outputs)
        gm, names = outlined(gm, [replace(request, nodes=nodes, kind="replaced", attrs=None)])
        name = names[0]
    return gm, next(r for r in regions(gm) if r.name == name)


@dataclass(frozen=True, eq=False)
class DecomposeEdit(Edit):
    """Regions back into their operations, and operations into simpler ones."""

    def apply(self, part: PartGraph, root: str, look: Look) -> tuple[PartGraph, list[str]]:
        gm = part.gm
        found = self._matches(part, root, look)
        closed = [m.nodes[0].name for m in found if isinstance(m.finder, ByRegion)]
        if closed:
            gm = inline_named(gm, closed, depth=1)
        plain = [name for m in found if not isinstance(m.finder, ByRegion) for name in self._parts_of(m)]
        if plain:
            gm = decomposed(gm, plain)
        return part.changed(gm), []

    @staticmethod
    def _parts_of(match: PartMatch) -> list[str]:
        """The operation of a match, or of several those that have simpler forms."""
        nodes = [n for n in match.nodes if not is_projection(n)]
        if len(nodes) == 1:
            return [nodes[0].name]
        names = [n.name for n in nodes if can_be_taken_apart(n)]
        if not names:
            raise ScheduleError(f"no operation of {match!r} can be taken apart into simpler ones")
        return names


@dataclass(frozen=True, eq=False)
class AnnotateEdit(Edit):
    """Attributes added to regions."""

    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def apply(self, part: PartGraph, root: str, look: Look) -> tuple[PartGraph, list[str]]:
        names = [m.nodes[0].name for m in self._matches(part, root, look)]
        known = {region.name: region for region in regions(part.gm)}
        graph = copy_graph(part.gm.graph)
        for node in graph.nodes:
            call = call_of(node.meta)
            if call is not None and node.name in names:
                region = known[node.name]
                identity = make_identity(region.kind, region.version, {**region.attrs, **self.attrs})
                write_call(node, replace(call, identity=identity))
        return part.changed(rebuild(part.gm, graph)), names


@dataclass(frozen=True, eq=False)
class LowerEdit(Edit):
    """Regions given to a backend."""

    backend: Any = None

    def apply(self, part: PartGraph, root: str, look: Look) -> tuple[PartGraph, list[str]]:
        names = [m.nodes[0].name for m in self._matches(part, root, look)]
        made = part.lowered(dict.fromkeys(names, self.backend), strict=True)
        require_lowered(made, names)
        for name, why in self._not_repeatable(part, names).items():
            raise ScheduleError(f"region '{name}' cannot be checkpointed: {why}")
        return made, names

    def again(self, part: PartGraph, root: str, look: Look) -> PartGraph:
        names = [m.nodes[0].name for m in self._matches(part, root, look)]
        left_out = self._not_repeatable(part, names)
        return part.lowered({n: self.backend for n in names if n not in left_out}, strict=False)

    def _not_repeatable(self, part: PartGraph, names: list[str]) -> dict[str, str]:
        return not_repeatable(part.gm, names) if isinstance(self.backend, Checkpoint) else {}


def require_lowered(part: PartGraph, names: Iterable[str]) -> None:
    """Raise unless the backends that regions were given to took them."""
    wanted = set(names)
    for region in regions(part.gm):
        if region.name in wanted and region.backend is None:
            told = [e for e in part.gm.meta[LOWERING].events if e.region == region.name and e.reason]
            why = (
                f"'{told[-1].backend}' does not take it: {told[-1].reason}" if told else "no backend took it"
            )
            raise ScheduleError(f"region '{region.name}' is not lowered: {why}")
