"""Calls that are refused: the type of the error and its words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import dovetail
from dovetail import rules

from .dump import Counting, describe, folder, section

Entries = Iterator[tuple[str, str]]
Call = Callable[[], Any]
X = torch.linspace(-1, 1, 16).reshape(2, 8)


class Opaque:
    def __repr__(self) -> str:
        return "Opaque()"


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() if x.sum() > 0 else x.tanh()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


class Moody(nn.Module):
    """Another result while it is traced."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_compiling() else x + 2


def chain(x: Tensor) -> Tensor:
    return x.relu().exp().tanh().sigmoid()


def relu_plus(x: Tensor) -> Tensor:
    return torch.relu(x) + 1


@functools.cache
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval()


@functools.cache
def gm() -> Any:
    return dovetail.capture(model(), (X,))


@functools.cache
def chained() -> Any:
    return dovetail.capture(chain, (X,))


@functools.cache
def fused() -> Any:
    return dovetail.fuse(gm())


def schedule() -> Any:
    return dovetail.schedule(model(), (X,))


def diamond(x: Tensor) -> Tensor:
    a = x.relu()
    b = a.exp()
    return b.tanh() + a


def written(x: Tensor) -> Tensor:
    a = x.clone()
    b = a.exp()
    a.add_(1)
    return a.sin() + b


def _outline(function: Callable[..., Any], nodes: Any, **options: Any) -> Any:
    graph = torch.fx.symbolic_trace(function)
    return dovetail.outline(graph, nodes, **{"kind": "k", **options})


def _broken_graph() -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    early = graph.call_function(torch.tanh, (x,))
    late = graph.call_function(torch.relu, (x,))
    graph.output(early)
    early.args = (late,)
    return GraphModule(nn.Module(), graph)


class Raises(dovetail.Rule):
    name = kind = "raises"

    def propose(self, scene: dovetail.Scene) -> Any:
        raise KeyError("sizes")


class Edits(dovetail.Pass):
    def run(self, gm: GraphModule) -> GraphModule:
        gm.graph.create_node("call_function", torch.relu, (next(iter(gm.graph.nodes)),))
        return gm


class Returns(dovetail.Pass):
    def run(self, gm: GraphModule) -> Any:
        return 3


class Bad(dovetail.Backend):
    name = "bad"

    def supports(self, region: dovetail.Region) -> Any:
        return True

    def compile(self, region: dovetail.Region, examples: Any) -> Any:
        raise RuntimeError("no compiler here")


class Wrong(Bad):
    name = "wrong"

    def compile(self, region: dovetail.Region, examples: Any) -> Any:
        return lambda *operands: tuple(r + 1 for r in region.body(*operands))


def _lowered(backend: Any, **options: Any) -> Any:
    return dovetail.lower(fused(), backend, on_error="raise", cache=False, **options)


def _capture(model: Any, *args: Any, **options: Any) -> Any:
    return dovetail.capture(model, args, **options)


_DIM = torch.export.Dim

CALLS: dict[str, dict[str, Call]] = {
    "capture": {
        "a class": lambda: _capture(Wrapped, X),
        "inputs that do not fit": lambda: _capture(Wrapped(nn.Linear(8, 8)), torch.ones(2, 9)),
        "too many inputs": lambda: _capture(nn.ReLU(), X, X),
        "no inputs": lambda: _capture(nn.ReLU()),
        "args no tuple": lambda: dovetail.capture(nn.ReLU(), X),
        "a branch on values": lambda: _capture(Branching(), X),
        "an attribute that counts": lambda: _capture(Counts(), X),
        "a model that fails": lambda: _capture(Fails(), X),
        "another result while traced": lambda: _capture(Moody(), X, check_capture=True),
        "TorchScript": lambda: _capture(torch.jit.script(nn.ReLU()), X),
        "TorchScript inside": lambda: _capture(Wrapped(torch.jit.script(nn.ReLU())), X),
        "unknown name of a dynamic input": lambda: _capture(
            nn.ReLU(), X, dynamic_shapes={"y": {0: _DIM.AUTO}}
        ),
        "no such dimension": lambda: _capture(nn.ReLU(), X, dynamic_shapes={"input": {5: _DIM("b")}}),
        "a dimension by text": lambda: _capture(nn.ReLU(), X, dynamic_shapes={"input": {"0": _DIM.AUTO}}),
        "another size": lambda: _capture(nn.ReLU(), X, dynamic_shapes={"input": {0: 3}}),
        "out of range": lambda: _capture(nn.ReLU(), X, dynamic_shapes={"input": {0: _DIM("b", min=5)}}),
        "unknown option": lambda: dovetail.capture(nn.ReLU(), (X,), stirct=True),
        "called with other sizes": lambda: gm()(torch.ones(3, 8)),
        "called with another dtype": lambda: gm()(X.double()),
        "called with more": lambda: gm()(X, X),
        "called by another name": lambda: gm()(y=X),
        "called in another mode": lambda: dovetail.capture(nn.Dropout(), (X,)).eval()(X),
    },
    "outline": {
        "an unknown node": lambda: _outline(chain, ["tnah"]),
        "a placeholder": lambda: _outline(chain, ["x"]),
        "the output": lambda: _outline(chain, ["output"]),
        "nothing": lambda: _outline(chain, []),
        "a hole": lambda: _outline(chain, ["relu", "tanh"]),
        "a node of another graph": lambda: _outline(chain, list(chained().graph.nodes)[1:2]),
        "a value that escapes": lambda: _outline(diamond, ["relu", "exp"], escapes="refuse"),
        "an unknown policy": lambda: _outline(diamond, ["relu", "exp"], escapes="outptu"),
        "a policy for what is not in it": lambda: _outline(diamond, ["relu"], escapes={"tanh": "output"}),
        "effects in another order": lambda: _outline(written, ["clone", "sin"]),
        "a write across a read": lambda: _outline(written, ["clone", "add_", "exp"], escapes="duplicate"),
        "two that overlap": lambda: dovetail.outline(
            chained(), [dovetail.Request(["relu", "exp"], "a"), dovetail.Request(["exp", "tanh"], "b")]
        ),
        "two that need each other": lambda: dovetail.outline(
            chained(), [dovetail.Request(["relu", "tanh"], "a"), dovetail.Request(["exp", "sigmoid"], "b")]
        ),
        "a wrong kind": lambda: _outline(chain, ["relu"], kind="a b"),
        "no kind": lambda: dovetail.outline(chained(), ["relu"]),
        "a wrong version": lambda: _outline(chain, ["relu"], version="2"),
        "attrs without JSON": lambda: _outline(chain, ["relu"], attrs={"x": X}),
        "attrs that are not finite": lambda: _outline(chain, ["relu"], attrs={"x": float("inf")}),
        "inline an unknown region": lambda: dovetail.inline(fused(), "linear_activaton_0"),
        "inline an unknown kind": lambda: dovetail.inline(fused(), kind="attention"),
        "inline where nothing is": lambda: dovetail.inline(gm(), "x_0"),
        "inline to no depth": lambda: dovetail.inline(fused(), depth=0),
        "check a graph out of order": lambda: dovetail.check(_broken_graph()),
        "outline a graph out of order": lambda: dovetail.outline(_broken_graph(), ["relu"], kind="k"),
        "declare nonsense": lambda: dovetail.declare(gm(), {torch.relu: "prue"}),
    },
    "fuse": {
        "must that is not there": lambda: dovetail.fuse(chained(), rules.groups(), must="tnah"),
        "must of no rule": lambda: dovetail.fuse(gm(), rules.siblings(), must="relu"),
        "must of a kind that is not made": lambda: dovetail.fuse(chained(), must="attention"),
        "must beyond a limit": lambda: dovetail.fuse(
            chained(), rules.groups(), must="relu", limits=dovetail.Limits(nodes=1)
        ),
        "must of nothing": lambda: dovetail.fuse(chained(), must=lambda n: False),
        "must and never": lambda: dovetail.fuse(chained(), must="tanh", never="tanh"),
        "must and never of a kind": lambda: dovetail.fuse(chained(), must="group", never="group"),
        "never of a placeholder": lambda: dovetail.fuse(chained(), never="x"),
        "never of a module that is not there": lambda: dovetail.fuse(chained(), never="layers.*"),
        "never of a number": lambda: dovetail.fuse(chained(), never=3),
        "a predicate that fails": lambda: dovetail.fuse(chained(), never=lambda n: 1 / 0),
        "a rule that fails": lambda: dovetail.fuse(chained(), Raises(), on_error="raise"),
        "a rule that fails and is left out": lambda: str(
            dovetail.explain(dovetail.fuse(chained(), [Raises(), rules.groups()]))
        ),
        "no rules": lambda: dovetail.fuse(chained(), [3]),
        "priorities of unknown rules": lambda: dovetail.fuse(chained(), priorities={"gruops": 1}),
        "a backend": lambda: dovetail.fuse(chained(), backend="eager"),
        "negative fuel": lambda: dovetail.fuse(chained(), fuel=-1),
        "no rounds": lambda: dovetail.fuse(chained(), rounds=0),
        "why not of what is not there": lambda: dovetail.explain(fused()).why_not("relu", "nowhere"),
        "why not of an input": lambda: dovetail.explain(fused()).why_not("input", "relu"),
        "a ledger without a graph": lambda: dovetail.Ledger().why_not("a", "b"),
        "no ledger": lambda: dovetail.Ledger.from_json("{}"),
        "a later ledger": lambda: dovetail.Ledger.from_json('{"version": 9}'),
    },
    "rules": {
        "no kind": lambda: dovetail.rule(relu_plus),
        "the kind as a text": lambda: dovetail.rule("k"),
        "an unknown option": lambda: dovetail.rule(kind="k", prority=1)(relu_plus),
        "a pattern without operations": lambda: dovetail.rule(kind="k")(lambda x: x),
        "a pattern that does not run": lambda: dovetail.rule(kind="k")(lambda x: x.nowhere()),
        "a pattern with a branch": lambda: dovetail.rule(kind="k")(lambda x: x.relu() if x.sum() > 0 else x),
        "a pattern that ignores an argument": lambda: dovetail.rule(kind="k")(lambda x, y: x.relu()),
        "a pattern that returns a number": lambda: dovetail.rule(kind="k")(lambda x: 3),
        "through nonsense": lambda: dovetail.rule(kind="k", through=["viwes"])(relu_plus),
        "two rules of one name": lambda: dovetail.RuleSet(rules.groups(), rules.groups()),
        "no such rule": lambda: dovetail.RuleSet(rules.groups())["gruops"],
        "a capability of unknown operators": lambda: rules.capability(["add", "no such op"], kind="k"),
        "a capability of nothing": lambda: rules.capability([], kind="k"),
        "modules of nothing": lambda: rules.modules([], kind="k"),
        "siblings that are not alike": lambda: rules.siblings(alike=False),
        "one sibling": lambda: rules.siblings(min_branches=1),
        "one repeat": lambda: rules.repeats(min_repeats=1),
        "no such rule of the library": lambda: rules.library.NRMS,
        "no such function": lambda: dovetail.fsue,
    },
    "passes": {
        "a class": lambda: dovetail.Pipeline([dovetail.Cleanup]),
        "a pass alone": lambda: dovetail.Pipeline(dovetail.Cleanup()),
        "a pass that edits": lambda: Edits()(dovetail.capture(chain, (X,))),
        "a pass that returns a number": lambda: Returns()(gm()),
        "a pass in a pipeline that returns a number": lambda: dovetail.Pipeline([Returns()])(gm()),
        "unknown option": lambda: dovetail.Cleanup(deep=True),
        "one branch": lambda: dovetail.MergeParallel(min_branches=1),
        "negative fuel": lambda: dovetail.FoldConvBatchNorm(fuel=-1),
        "no limit": lambda: dovetail.FoldConstants(limit=-1),
        "repeat never": lambda: dovetail.Repeat(dovetail.Cleanup(), most=0),
        "bisect what is good": lambda: dovetail.bisect(
            dovetail.Pipeline([dovetail.Fuse()]), gm(), lambda g: True
        ),
        "bisect what is bad before": lambda: dovetail.bisect(
            dovetail.Pipeline([dovetail.Fuse()]), gm(), lambda g: False
        ),
    },
    "lower": {
        "an unknown backend": lambda: dovetail.compile(nn.ReLU(), (X,), backends="inductr"),
        "no name": lambda: dovetail.compile(nn.ReLU(), (X,), backends=""),
        "two of one name": lambda: dovetail.lower(fused(), [Counting(), Counting()]),
        "an unknown kind": lambda: dovetail.lower(fused(), {"linear_actvation": "eager"}, on_error="raise"),
        "a plan of an unknown region": lambda: _lowered("eager", plan={"nowhere_0": "eager"}),
        "a backend that fails": lambda: _lowered(Bad()),
        "a backend that is wrong": lambda: _lowered(Wrong(), verify=True),
        "an old name": lambda: dovetail.lower(fused(), specialisations=3),
        "a wrong granularity": lambda: dovetail.compile(nn.ReLU(), (X,), granularity="middle"),
        "rules and a pipeline": lambda: dovetail.compile(nn.ReLU(), (X,), rules=[], pipeline=[]),
        "dynamic twice": lambda: dovetail.compile(nn.ReLU(), (X,), dynamic=True, dynamic_shapes={}),
        "compiled twice": lambda: dovetail.compile(dovetail.compile(nn.ReLU(), backends="eager")),
        "CUDA graphs without CUDA": lambda: dovetail.compile(
            nn.ReLU(), (X,), backends="eager", cuda_graphs=True
        ),
        "a model that cannot be captured": lambda: dovetail.compile(
            Branching(), (X,), backends="eager", on_error="raise"
        ),
        "an option of torch.compile": lambda: dovetail.compile(nn.ReLU(), mode="max-autotune"),
        "an option that a backend has not": lambda: dovetail.backends.Eager(optoins={}),
        "no such backend class": lambda: dovetail.backends.Indcutor,
        "refresh what is not compiled": lambda: dovetail.refresh(nn.ReLU()),
        "bisect what is not lowered": lambda: dovetail.bisect_lowering(fused(), lambda g: True),
        "replace an unknown region": lambda: dovetail.replace_region(fused(), "nowhere", torch.relu),
        "replace by something else": lambda: dovetail.replace_region(
            fused(), dovetail.regions(fused())[0].name, lambda *operands: operands[0]
        ),
    },
    "files": {
        "no file": lambda: dovetail.load("nowhere.pt2"),
        "not an archive": lambda: _loaded(b"nonsense"),
        "an empty file": lambda: _loaded(b""),
        "no graph": lambda: dovetail.save(model(), "graph.pt2"),
        "no folder": lambda: dovetail.save(gm(), "nowhere/graph.pt2"),
        "onnx of a model": lambda: dovetail.to_onnx(model(), "graph.onnx"),
        "onnx without a file": lambda: dovetail.from_onnx("nowhere.onnx"),
    },
    "schedule": {
        "an unknown part": lambda: schedule()["3"],
        "an unknown pattern": lambda: schedule()["layers.*"],
        "nothing found": lambda: schedule().fuse(schedule().find(torch.ops.aten.gelu.default)),
        "nothing done": lambda: schedule().undo(),
        "an unknown step": lambda: schedule().replay([{"do": "dance"}]),
        "no history": lambda: schedule().replay("{}"),
        "a replacement of another shape": lambda: schedule()["2"].replace(nn.Linear(8, 3), check=True),
        "an unknown option": lambda: schedule()["0"].fuse([], backend="eager"),
        "fuse modules that are not there": lambda: dovetail.fuse_modules(model(), ["0", "9"]),
        "fuse modules in another order": lambda: dovetail.fuse_modules(model(), ["1", "0"], (X,)),
        "fuse one module": lambda: dovetail.fuse_modules(model(), ["0"]),
        "a model that is a class": lambda: dovetail.schedule(nn.ReLU, (X,)),
        "inputs that do not fit": lambda: dovetail.schedule(model(), (torch.ones(2, 9),)).find(relu_plus),
    },
}


def _loaded(data: bytes) -> Any:
    Path("some.pt2").write_bytes(data)
    return dovetail.load("some.pt2")


WRONG: dict[str, Any] = {
    "None": None,
    "3": 3,
    "'a'": "a",
    "[]": [],
    "an object": Opaque(),
    "a class": nn.Linear,
}
SWEPT: dict[str, Callable[[Any], Any]] = {
    "capture": lambda b: dovetail.capture(b, (X,)),
    "capture kwargs": lambda b: dovetail.capture(model(), (X,), b),
    "compile": dovetail.compile,
    "compile backends": lambda b: dovetail.compile(model(), backends=b),
    "compile rules": lambda b: dovetail.compile(model(), backends="eager", rules=b),
    "compile pipeline": lambda b: dovetail.compile(model(), backends="eager", pipeline=b),
    "compile plan": lambda b: dovetail.compile(model(), backends="eager", plan=b),
    "compile on_error": lambda b: dovetail.compile(model(), backends="eager", on_error=b),
    "compile verify": lambda b: dovetail.compile(model(), backends="eager", verify=b),
    "compile smallest": lambda b: dovetail.compile(model(), backends="eager", smallest=b),
    "compile timeout": lambda b: dovetail.compile(model(), backends="eager", timeout=b),
    "compile cache": lambda b: dovetail.compile(model(), backends="eager", cache=b),
    "compile recompile_limit": lambda b: dovetail.compile(model(), backends="eager", recompile_limit=b),
    "fuse": dovetail.fuse,
    "fuse rules": lambda b: dovetail.fuse(gm(), b),
    "fuse limits": lambda b: dovetail.fuse(gm(), limits=b),
    "fuse cost": lambda b: dovetail.fuse(gm(), cost=b),
    "fuse on_error": lambda b: dovetail.fuse(gm(), on_error=b),
    "lower": lambda b: dovetail.lower(b, "eager"),
    "explain": dovetail.explain,
    "regions": dovetail.regions,
    "text": dovetail.text,
    "diff": lambda b: dovetail.diff(gm(), b),
    "check": dovetail.check,
    "declare": lambda b: dovetail.declare(gm(), b),
    "outline": lambda b: dovetail.outline(b, ["relu"], kind="k"),
    "outline nodes": lambda b: dovetail.outline(gm(), b, kind="k"),
    "outline kind": lambda b: dovetail.outline(gm(), ["relu"], kind=b),
    "outline attrs": lambda b: dovetail.outline(gm(), ["relu"], kind="k", attrs=b),
    "inline": dovetail.inline,
    "inline depth": lambda b: dovetail.inline(fused(), depth=b),
    "save path": lambda b: dovetail.save(fused(), b) if b != "a" else None,
    "to_stablehlo": dovetail.to_stablehlo,
    "schedule": lambda b: dovetail.schedule(b, (X,)),
    "find": lambda b: schedule().find(b),
    "fuse matches": lambda b: schedule().fuse(b),
    "part": lambda b: schedule()[b],
    "Pipeline": dovetail.Pipeline,
    "Limits": lambda b: dovetail.Limits(nodes=b),
    "Decline": dovetail.Decline,
    "RuleSet": dovetail.RuleSet,
    "rule": lambda b: dovetail.rule(b, kind="k"),
    "rule examples": lambda b: dovetail.rule(kind="k", examples=b)(relu_plus),
    "capability": lambda b: rules.capability(b, kind="k"),
    "modules": lambda b: rules.modules(b, kind="k"),
    "siblings": lambda b: rules.siblings(of=b),
    "repeats": lambda b: rules.repeats(min_size=b),
    "optional": lambda b: dovetail.optional(X, b),
    "Ledger": dovetail.Ledger.from_json,
}


def _outcome(call: Call) -> str:
    try:
        result = call()
    except Exception as error:
        return describe(error)
    return f"not refused:\n{result}" if isinstance(result, str) else "not refused"


def entries(group: str) -> Entries:
    with folder():
        for name, call in CALLS[group].items():
            yield name, _outcome(call) + "\n"


def swept() -> Entries:
    """Of each kind of wrong thing one, in the place of an argument."""
    with folder():
        for name, call in SWEPT.items():
            parts = [section(kind, _outcome(functools.partial(call, value))) for kind, value in WRONG.items()]
            yield name, "".join(parts)


SUBJECTS: dict[str, Callable[[], Entries]] = {
    **{f"errors/{group}": functools.partial(entries, group) for group in CALLS},
    "errors/swept": swept,
}
