"""What must hold of every program and every request, one small function for each property."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from dataclasses import dataclass, field
from random import Random
from typing import Any

from torch.fx import Graph, GraphModule, Node

import dovetail
from dovetail.ir.dependencies import dependencies
from dovetail.ir.effects import effects_of
from dovetail.ir.op_traits import target_name

from .fusing import why_not_settled
from .observe import Snapshot, difference, observe
from .plan import carry_out
from .program import Case, Fused, NotAProgram, Opened, Stage, build, make_inputs
from .soundness import Untold, watch


class Violated(AssertionError):
    """A property does not hold. `which` names it, so that equal causes can be told from others."""

    def __init__(self, which: str, words: str) -> None:
        super().__init__(f"{which}: {words}")
        self.which, self.words = which, words


@dataclass
class Outcome:
    """What became of a case, for the statistics of a run."""

    stages: int = 0
    refused: list[str] = field(default_factory=list)
    regions: int = 0


def verify(case: Case, original: GraphModule | None = None) -> Outcome:
    """Raise Violated for the first property that does not hold of a case; `original` is its program, if built."""
    trial = Trial(case, original or build(case.program))
    trial.carry_out()
    trial.compare()
    return trial.outcome


class Trial:
    def __init__(self, case: Case, original: GraphModule) -> None:
        self.case = case
        self.rng = Random(case.salt)
        self.outcome = Outcome()
        self.original = original
        self.result: GraphModule = self.original
        self.inputs = make_inputs(case.program)
        self.state = Snapshot(self.original)
        # A view of a clone does not share memory with the original: where clones are asked for, that shows.
        self.aliasing = not _asks_for_clones(case)
        self.expected = observe(
            self.original, self.state, self.inputs, runs=2, gradients=_has_gradients(case, self.state)
        )
        if self.expected[-1].error:
            raise NotAProgram(self.expected[-1].error)
        self.foretold(self.original)
        self.text = dovetail.text(self.original)
        self.facts = facts(self.original)

    def carry_out(self) -> None:
        """Outline and inline stage by stage; whatever comes of it, the input graph stays as it is."""
        for stage in self.case.stages:
            self.outcome.stages += 1
            before = identity(self.result)
            outlined: GraphModule | None = None
            try:
                outlined = carry_out(self.result, stage)
            except dovetail.DovetailError as error:
                self.outcome.refused.append(type(error).__name__)
                _expect_reason(self.result, stage, error)
            except Exception as error:
                steps = {Opened: "inline", Fused: "fuse"}
                step = steps.get(type(stage), "outline")
                raise Violated(f"crash in {step} ({type(error).__name__})", str(error)) from error
            same("input graph changed", before, identity(self.result))
            if outlined is not None:
                _expect_regions(self.result, outlined, stage)
                if isinstance(stage, Fused):
                    same("fused once more", "", why_not_settled(outlined, stage))
                self.result = outlined

    def compare(self) -> None:
        """Everything that must be the same of the result, if there is one."""
        if self.result is self.original:
            return
        self.outcome.regions = len(dovetail.regions(self.result))
        same("state_dict", list(self.original.state_dict()), list(self.result.state_dict()))
        self.foretold(self.result)
        self.behaves("values", self.result, runs=2, gradients=True)
        self.restores("inline", self.result)
        self.survives_elimination()
        _try("check", lambda: dovetail.check(self.result))
        if self.case.thorough:
            self.survives_copies()
            self.inlines_in_part()
            self.behaves_at_other_sizes()
            self.lowers()
        if _is_pure(self.original):
            relisted(self.original, self.case)

    def foretold(self, gm: GraphModule) -> None:
        """Effects are decided from schemas; whatever a node does when it runs must be among them."""
        try:
            watch(gm, self.state, self.inputs)
        except Untold as untold:
            raise Violated(
                f"effects: a node {untold.what} ({target_name(untold.node)})", str(untold)
            ) from untold

    # Properties of a graph that should be the original in other clothes

    def behaves(self, what: str, gm: GraphModule, *, runs: int = 1, gradients: bool = False) -> None:
        which, words = self.difference(gm, runs=runs, gradients=gradients)
        if which:
            raise Violated(f"{what}: {which}", words)

    def difference(
        self, gm: GraphModule, state: Snapshot | None = None, *, runs: int = 1, gradients: bool = False
    ) -> tuple[str, str]:
        """What can be seen of running a graph that could not be seen of the original, or the other way round."""
        gradients = gradients and self.expected[0].gradients is not None
        observed = observe(gm, state or self.state, self.inputs, runs=runs, gradients=gradients)
        return difference(self.expected[:runs], observed, gradients=gradients, aliasing=self.aliasing)

    def restores(self, what: str, gm: GraphModule) -> None:
        back = _try(what, lambda: dovetail.inline(gm))
        same(f"{what}: text", self.text, dovetail.text(back))
        same(f"{what}: nodes and meta", self.facts, facts(back))
        _try(f"{what}: check", lambda: dovetail.check(back))
        same(f"{what}: modules", list(self.original._modules), list(back._modules))

    def survives_elimination(self) -> None:
        """FX's own dead-code elimination does no more harm to the result than to the original."""
        if any(_unknown_to_fx(self.result, node) for node in self.result.graph.nodes):
            return  # such a node is dropped as soon as nobody reads it, with regions or without
        which, words = self.difference(_eliminated(self.result))
        if which and not self.difference(_eliminated(self.original))[0]:
            raise Violated(f"dead-code elimination: {which}", words)

    def survives_copies(self) -> None:
        shown = dovetail.text(self.result)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            copies = {
                "deepcopy": _try("deepcopy", lambda: copy.deepcopy(self.result)),
                "pickle": _try("pickle", lambda: pickle.loads(pickle.dumps(self.result))),
            }
        for what, gm in copies.items():
            same(f"{what}: text", shown, dovetail.text(gm))
            which, words = self.difference(gm, Snapshot(gm))
            if which:
                raise Violated(f"{what}: {which}", words)
            _try(f"{what}: check", lambda gm=gm: dovetail.check(gm))
            same(f"{what}: inline", self.text, dovetail.text(_try(what, lambda gm=gm: dovetail.inline(gm))))

    def lowers(self) -> None:
        """Its regions run by backends, it is the same program, and can be taken apart as before.

        The plainest one takes everything; a tracing one, with another dialect of results, may leave some to it.
        """
        options: dict[str, Any] = {"granularity": ("outer", "inner")[self.rng.randrange(2)], "smallest": 1}
        if self.rng.randrange(2):
            chain, options["on_error"] = ["eager"], "raise"
        else:
            chain = ["torchscript", "eager"]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the graph has no regions to lower", UserWarning)
            lowered = _try("lower", lambda: dovetail.lower(self.result, chain, cache=False, **options))
        self.behaves("lowered", lowered, runs=2, gradients=True)
        self.restores("lowered, inline", lowered)

    def inlines_in_part(self) -> None:
        """Some regions opened first, by name, kind or depth; the rest after that."""
        known = dovetail.regions(self.result, nested=True)
        if not known:
            return
        one = known[self.rng.randrange(len(known))]
        ways: dict[str, dict[str, Any]] = {
            "inline by name": {"name": one.name},
            "inline by kind": {"kind": one.kind},
            "inline depth=1": {"depth": 1},
        }
        for what, arguments in ways.items():
            partial = _try(what, lambda arguments=arguments: dovetail.inline(self.result, **arguments))
            _try(f"{what}: check", lambda partial=partial: dovetail.check(partial))
            self.behaves(what, partial)
            self.restores(what, partial)

    def behaves_at_other_sizes(self) -> None:
        if self.case.program.values != "symbolic":
            return
        inputs = make_inputs(self.case.program, batch=1)
        with contextlib.redirect_stderr(io.StringIO()):  # FX prints the traceback of whatever is raised
            expected = observe(self.original, self.state, inputs)
        if expected[0].error:
            return  # written for one size only
        observed = observe(self.result, self.state, inputs)
        which, words = difference(expected, observed, aliasing=self.aliasing)
        if which:
            raise Violated(f"another batch: {which}", words)


def _expect_reason(gm: GraphModule, stage: Stage, error: dovetail.DovetailError) -> None:
    """A stretch of the listing as it stands can always be one region: nothing lies between its operations."""
    if isinstance(stage, Fused):
        raise Violated(f"fuse refused ({type(error).__name__})", str(error))
    if isinstance(stage, Opened) or len(stage) != 1 or stage[0].escapes not in ("auto", "output"):
        return
    if isinstance(error, dovetail.EmptyRegion):
        return  # a lone constant is cloned, and then nothing is left to call
    nodes = list(gm.graph.nodes)
    at = {node.name: i for i, node in enumerate(nodes)}
    places = sorted({at.get(name, -1) for name in stage[0].nodes})
    if places != list(range(places[0], places[-1] + 1)):
        return
    chosen = [nodes[i] for i in places]
    if any(n.op in ("placeholder", "get_attr", "output") or _splits_a_tuple(n, chosen) for n in chosen):
        return
    raise Violated(f"refused without need ({type(error).__name__})", str(error))


def _splits_a_tuple(node: Node, chosen: list[Node]) -> bool:
    """Whether a node and its getitems are on both sides: taking them along may well be refused."""
    if node.target.__class__.__name__ == "builtin_function_or_method" and node.args:
        source = node.args[0]
        return isinstance(source, Node) and source not in chosen
    parts = [u for u in node.users if getattr(u.target, "__name__", "") == "getitem"]
    return any(p not in chosen for p in parts)


def _expect_regions(before: GraphModule, after: GraphModule, stage: Stage) -> None:
    """The new regions are there, of the kinds asked for, under names of their own."""
    names = [r.name for r in dovetail.regions(after, nested=True)]
    same("names of regions are unique", len(names), len(set(names)))
    if isinstance(stage, (Opened, Fused)):
        return
    old = {r.name for r in dovetail.regions(before)}
    new = [r for r in dovetail.regions(after) if r.name not in old]
    same("kinds of regions", sorted(a.kind for a in stage), sorted(r.kind for r in new))
    expected = sorted((a.kind, a.version) for a in stage)
    same("versions of regions", expected, sorted((r.kind, r.version) for r in new))


def relisted(original: GraphModule, case: Case) -> None:
    """The same graph in another topological order gives regions of the same members."""
    rng = Random(case.salt)
    stage = case.stages[0]
    other = _in_another_order(original, rng)
    same("relisting", _members(original, stage), _members(other, stage))


def _members(gm: GraphModule, stage: Stage) -> Any:
    try:
        result = carry_out(gm, stage)
    except dovetail.DovetailError as error:
        return type(error).__name__
    except Exception as error:
        step = "fuse" if isinstance(stage, Fused) else "outline"
        raise Violated(f"crash in {step} ({type(error).__name__})", str(error)) from error
    return sorted((r.kind, sorted(r.nodes), sorted(r.escapes.items())) for r in dovetail.regions(result))


def _in_another_order(gm: GraphModule, rng: Random) -> GraphModule:
    graph = Graph()
    env: dict[Node, Node] = {}
    left = [n for n in gm.graph.nodes if n.op != "output"]
    while left:
        inputs = left[0].op == "placeholder"  # these keep their order: it is how the graph is called
        ready = [n for n in left if all(i in env for i in n.all_input_nodes)]
        node = left[0] if inputs else ready[rng.randrange(len(ready))]
        env[node] = graph.node_copy(node, env.__getitem__)
        left.remove(node)
    graph.node_copy(gm.graph.output_node(), env.__getitem__)
    return GraphModule(gm, graph)


def _is_pure(gm: GraphModule) -> bool:
    order = dependencies(gm, list(gm.graph.nodes))
    return not order.before and all(e.pure for e in order.effects.values())


def _asks_for_clones(case: Case) -> bool:
    asked = [a.escapes for stage in case.stages if isinstance(stage, tuple) for a in stage]
    return any("duplicate" in (e.values() if isinstance(e, dict) else (e,)) for e in asked)


def _has_gradients(case: Case, state: Snapshot) -> bool:
    return case.program.grads or any(t.requires_grad for t in state.tensors.values())


def _eliminated(gm: GraphModule) -> GraphModule:
    if type(gm).__copy__ is GraphModule.__copy__:
        graph = Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        new = GraphModule(gm, graph)
    else:
        new = copy.copy(gm)
    new.graph.eliminate_dead_code()
    new.recompile()
    return new


def _unknown_to_fx(gm: GraphModule, node: Node) -> bool:
    """Whether an operation outside regions has an effect that FX does not see."""
    return "dovetail.region" not in node.meta and not effects_of(node, gm).pure and not node.is_impure()


def facts(gm: GraphModule) -> list[Any]:
    """Each node with everything on it. Meta values are compared by equality, which tensors answer by identity."""
    return [
        (
            n.name,
            n.op,
            str(n.target),
            str(n.args),
            str(n.kwargs),
            n.type,
            {k: _Value(v) for k, v in n.meta.items()},
        )
        for n in gm.graph.nodes
    ]


@dataclass(frozen=True, eq=False)
class _Value:
    """A meta value that is equal to itself and to what Python calls equal, and to nothing that raises."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value):
            return False
        if self.value is other.value:
            return True
        try:
            return bool(self.value == other.value)
        except Exception:  # a tensor has no one truth value
            return False

    def __repr__(self) -> str:
        return repr(self.value)


def identity(gm: GraphModule) -> list[Any]:
    """A graph as an object: the very nodes, what is on them, and what the module owns."""
    nodes = list(gm.graph.nodes)
    return [
        dovetail.text(gm),
        nodes,
        [list(n.users) for n in nodes],
        [[(k, id(v)) for k, v in n.meta.items()] for n in nodes],
        list(gm.meta.items()),
        [(k, id(v)) for k, v in gm._modules.items()],
        [(k, id(v)) for k, v in (*gm._parameters.items(), *gm._buffers.items())],
    ]


def same(which: str, want: Any, got: Any) -> None:
    """Raise Violated unless two values are equal; of lists the first that differ are told."""
    if want != got:
        if isinstance(want, list) and isinstance(got, list):
            pairs = [(a, b) for a, b in zip(want, got, strict=False) if a != b]
            want, got = pairs[0] if pairs else (len(want), len(got))
        raise Violated(which, f"{want}\nbecame\n{got}")


def _try(what: str, step: Any) -> Any:
    try:
        return step()
    except Exception as error:
        raise Violated(f"{what} ({type(error).__name__})", str(error)) from error
