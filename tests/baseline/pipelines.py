"""Passes, rules of every sort, schedules and files on a few models."""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail import rules

from .dump import Counting, describe, folder, ledger, section, tried, whole
from .models import of_the_zoo

Entries = Iterator[tuple[str, str]]


@functools.cache  # nothing edits what it is given
def captured(name: str, train: bool = False) -> Any:
    return of_the_zoo(name, train=train).capture()


# Passes


def _pipelines() -> dict[str, dovetail.Pipeline]:
    cleanup, merge = dovetail.Cleanup(), dovetail.Repeat(dovetail.MergeParallel())
    return {
        "cleanup": dovetail.Pipeline([cleanup]),
        "merge": dovetail.Pipeline([cleanup, merge]),
        "merge once and for all": dovetail.Pipeline([dovetail.MergeParallel(materialise=True)]),
        "fold constants": dovetail.Pipeline([dovetail.FoldConstants(), cleanup]),
        "fold norms": dovetail.Pipeline([dovetail.FoldConvBatchNorm()]),
        "everything": dovetail.Pipeline(
            [
                dovetail.Repeat(cleanup, dovetail.FoldConstants()),
                dovetail.FoldConvBatchNorm(),
                merge,
                dovetail.Fuse(),
                dovetail.Fuse(rules.repeats()),
                dovetail.Inline(kind="group"),
            ]
        ),
    }


def pass_entries(name: str, train: bool) -> Entries:
    for title, pipeline in _pipelines().items():
        yield title, tried(functools.partial(_traced, pipeline, name, train))


def _traced(pipeline: dovetail.Pipeline, name: str, train: bool) -> str:
    run = pipeline.trace(captured(name, train), check=True, explain=True)
    text = section("pipeline", repr(pipeline))
    for step in run.steps:
        row = f"{step.number} at {step.place}: {step.options}, nodes {step.nodes}, regions {step.regions}"
        text += section(f"{row}, {'changed' if step.changed else 'unchanged'}", map(str, step.findings))
    return text + whole(run.graph)


# Rules


def _linear(node: Any) -> bool:
    return "linear" in str(node.target)


@dovetail.rule(kind="scaled_act", escapes="output")
def activated(x: Tensor, w: Tensor, b: Tensor, factor: float = dovetail.Const()) -> Tensor:
    hidden = F.linear(x, w, b)
    return (
        dovetail.either(lambda: F.gelu(hidden), lambda: torch.relu(hidden), lambda: torch.tanh(hidden))
        * factor
    )


@dovetail.rule(kind="linear_then")
def declined(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return dovetail.optional(F.linear(x, w, b), torch.relu)


@declined.guard
def _never(match: dovetail.Match) -> Any:
    return dovetail.Decline(f"never taken, at {match.module_path}")


def _rules() -> dict[str, Callable[[], Any]]:
    return {
        "repeats": rules.repeats,
        "repeats nested": lambda: rules.repeats(nested=True, min_size=2),
        "modules by path": lambda: rules.modules(["layers.*", "blocks.*"], kind="layer"),
        "modules by class": lambda: rules.modules([nn.Linear, nn.LayerNorm, nn.Conv2d], kind="npu.module"),
        "siblings": rules.siblings,
        "siblings and what follows": lambda: rules.siblings(follow=True, kind="lanes"),
        "siblings of some": lambda: rules.siblings(of=_linear, min_branches=3),
        "capability": lambda: rules.capability(
            ["add", "mul", "linear", "relu", "gelu", "silu"], kind="npu.part"
        ),
        "capability of anything": lambda: rules.capability(lambda node: True, kind="all", name="all"),
        "capability of siblings": lambda: rules.capability(["mul", "sub"], kind="k", join_siblings=True),
        "groups": rules.groups,
        "groups that nest": lambda: [rules.groups(nests=True, kind="pair", grows=False), rules.repeats()],
        "patterns": lambda: [activated, declined],
        "norms and gates": lambda: [rules.library.NORMS, rules.library.GATES],
    }


def rule_entries(name: str) -> Entries:
    for title, make in _rules().items():
        yield title, tried(lambda make=make: whole(dovetail.fuse(captured(name), make())))


_OPTIONS: dict[str, dict[str, Any]] = {
    "one round": {"rounds": 1},
    "limits": {"limits": dovetail.Limits(nodes=4, operands=3, outputs=2)},
    "bytes": {"limits": dovetail.Limits(bytes=4096)},
    "fuel": {"fuel": 3},
    "priorities": {"priorities": {"groups": 100, "layer_norm": 50}},
    "never a kind": {"never": ["attention", "group"]},
    "never a module": {"never": "layers.0"},
    "never a node": {"never": _linear},
    "must": {"must": ["attention", "layer_norm"]},
    "cost": {"cost": dovetail.Traffic(launch_bytes=1, flops_per_byte=1)},
}


def option_entries() -> Entries:
    for title, options in _OPTIONS.items():
        yield title, tried(lambda options=options: whole(dovetail.fuse(captured("bert"), **options)))
    fused = dovetail.fuse(captured("bert"))
    yield "diff", dovetail.diff(captured("bert"), fused) + dovetail.diff(fused, captured("bert"), context=0)
    yield "reasons", tried(lambda: _reasons(fused))
    yield "reproducer", tried(lambda: _reproduced(fused))


def _reasons(fused: Any) -> str:
    names = [name for region in dovetail.regions(fused) for name in (region.nodes[0], region.nodes[-1])]
    decisions = dovetail.explain(fused)
    pairs = list(zip(names, names[3:], strict=False))[::4]
    return "".join(section(f"{a} and {b}", str(decisions.why_not(a, b))) for a, b in pairs)


def _reproduced(fused: Any) -> str:
    with folder() as at:
        return dovetail.regions(fused)[0].reproducer(at / "region.py").read_text()


# Outlining


def outline_entries() -> Entries:
    gm = captured("mlp")
    names = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    for policy in ("auto", "output", "duplicate", "leave", "refuse"):
        for first, last in ((0, 3), (1, 6), (2, len(names) - 1)):
            yield (
                f"{policy} {first} to {last}",
                tried(
                    lambda policy=policy, first=first, last=last: whole(
                        dovetail.outline(
                            gm, names[first:last], kind="stretch", escapes=policy, attrs={"a": [1, 2.5]}
                        )
                    )
                ),
            )
    requests = [dovetail.Request(names[i : i + 2], "pair", version=2) for i in range(0, len(names) - 1, 2)]
    twice = dovetail.outline(dovetail.outline(gm, requests), ["pair_0", "pair_1"], kind="outer")
    yield "two at a time, and one around two", whole(twice)
    yield "opened once", whole(dovetail.inline(twice, depth=1))
    yield "opened by kind", whole(dovetail.inline(twice, kind="pair"))
    yield "opened by name", whole(dovetail.inline(twice, "outer_0/pair_0"))
    yield "opened", whole(dovetail.inline(twice))


# Lowering


class Kernels(dovetail.Backend):
    name = "kernels"
    kernels = {"linear_activation": lambda x, weight, bias, **attrs: F.gelu(F.linear(x, weight, bias))}  # noqa: RUF012


def lower_entries() -> Entries:
    fused = dovetail.fuse(captured("mlp"))
    nested = dovetail.fuse(fused, rules.repeats())
    few = Counting("few", ["linear_activation"])
    ways: dict[str, Callable[[], Any]] = {
        "chain": lambda: dovetail.lower(fused, [few, Counting()], cache=False),
        "by kind": lambda: dovetail.lower(fused, {"layer_norm": Counting(), "*": "eager"}, cache=False),
        "inner": lambda: dovetail.lower(nested, Counting(), granularity="inner", cache=False),
        "outer": lambda: dovetail.lower(nested, Counting(), cache=False, verify=True),
        "kernels": lambda: dovetail.lower(fused, [Kernels(), Counting()], cache=False),
        "plan": lambda: dovetail.lower(fused, Counting(), plan={"layer_norm_0": "eager"}, cache=False),
        "of one operation": lambda: dovetail.lower(fused, Counting(), smallest=1, cache=False),
    }
    for title, way in ways.items():
        yield title, tried(lambda way=way: whole(way()))


# Schedules


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.stats, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.stats(self.norm(x + self.down(F.gelu(self.up(x))))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mlp(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w, b)), v, c)


def gelu_by_hand(x: Tensor) -> Tensor:
    return F.gelu(x)


def _net(train: bool) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().train(train), torch.randn(4, 8)


def schedule_entries(train: bool) -> Entries:
    model, x = _net(train)
    s = dovetail.schedule(model, (x,))
    text = section("model", str(s))
    steps: dict[str, Callable[[], Any]] = {
        "fuse": lambda: s.fuse(s["blocks.*"].find(mlp), kind="mlp", attrs={"tile": 64}),
        "fuse for a backend": lambda: s.fuse(s["blocks.1"].find(nn.LayerNorm), kind="norm", backends="eager"),
        "fuse by rules": lambda: s.fuse(s["blocks.2"].find(rules.library.NORMS)),
        "annotate": lambda: s.annotate(s.regions[0], level=2),
        "annotate parts": lambda: s["blocks.*"].annotate(stage=1),
        "checkpoint": lambda: s.checkpoint("blocks.2"),
        "find nothing": lambda: s.fuse(s["head"].find(mlp)),
        "decompose": lambda: s.decompose(s["blocks.0"].regions),
        "replace": lambda: s.replace(gelu_by_hand, s["blocks.0"].find(torch.ops.aten.gelu.default)[0]),
        "lower": lambda: s.lower(s["blocks.1"].regions, "eager"),
        "no such part": lambda: s["block.1"],
    }
    for title, step in steps.items():
        try:
            step()
            text += section(title, str(s))
        except Exception as error:
            text += section(title, f"{describe(error)}\n{s}")
    text += section("text", s.text()) + section("history", s.history.json())
    text += section("regions", [f"{r.name} {r.kind} {' '.join(r.nodes)}" for r in s.regions])
    text += section("verified", tried(lambda: str(s.verify().runs)))
    other = dovetail.schedule(_net(train)[0], (x,)).replay(s.history.json())
    text += section("replayed", "the same" if other.text() == s.text() else other.text())
    s.undo(2)
    yield "steps", text + section("undone", str(s))


def zoo_schedule_entries(name: str, glob: str) -> Entries:
    subject = of_the_zoo(name)
    s = dovetail.schedule(subject.model, subject.args, subject.kwargs)
    library = rules.library
    text = ""
    for title, kinds in {
        "norms": library.NORMS,
        "attention": library.ATTENTION,
        "gates": library.GATES,
    }.items():
        matches = s[glob].find(kinds)
        text += section(
            title, [f"{match.rule}: {' '.join(n.name for n in match.nodes)}" for match in matches]
        )
        if matches:
            s.fuse(matches)
    yield "fused", text + section("schedule", str(s)) + section("text", s.text())
    yield "history", "\n".join(repr(entry) for entry in s.history) + "\n"


def fuse_modules_entries() -> Entries:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 4), nn.ReLU()]
    x = torch.randn(2, 3, 5, 5)
    for mode in ("eval", "train"):
        model = nn.Sequential(*layers).train(mode == "train")
        for names in (["0", "1", "2"], [["0", "1"], ["4", "5"]], ["1", "2"], ["0", "2"]):
            text = tried(lambda model=model, names=names: str(dovetail.fuse_modules(model, names, (x,))))
            yield f"{mode} {names}", text + "\n"


# Files


def file_entries(name: str) -> Entries:
    fused = dovetail.fuse(dovetail.fuse(captured(name)), rules.repeats())
    with folder() as at:
        dovetail.save(fused, at / "graph.pt2")
        with zipfile.ZipFile(at / "graph.pt2") as archive:
            record = next(n for n in archive.namelist() if n.endswith("dovetail_graph.json"))
            described = json.loads(archive.read(record))
        del described["checksums"]  # of weights, which another machine may draw otherwise
        yield "saved", json.dumps(described, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
        yield "loaded", whole(dovetail.load(at / "graph.pt2"))
        yield "onnx", tried(lambda: _onnx(dovetail.to_onnx(fused, at / "graph.onnx")))
        yield "from onnx", tried(lambda: whole(dovetail.from_onnx(at / "graph.onnx")))
        yield "artefact", tried(lambda: _exported(fused, at))
    yield "ledger again", ledger(fused)


def _onnx(path: Any) -> str:
    import onnx

    model = onnx.load(path)
    owners = [("graph", model.graph), *((f.name, f) for f in model.functions)]
    return "".join(
        section(name, [f"{n.op_type}({', '.join(n.input)}) -> {', '.join(n.output)}" for n in owner.node])
        for name, owner in owners
    )


def _exported(fused: Any, at: Any) -> str:
    exported = dovetail.regions(fused)[0].export(at / "region")
    names = sorted(str(p.relative_to(exported)) for p in exported.rglob("*") if p.is_file())
    texts = [
        section(n, (exported / n).read_text()) for n in names if n.endswith((".json", ".py", ".md", ".txt"))
    ]
    return section("files", names) + "".join(texts)


SUBJECTS: dict[str, Callable[[], Entries]] = {
    **{
        f"rules/{n}": functools.partial(rule_entries, n) for n in ("mlp", "llama", "inception", "lstm", "moe")
    },
    **{
        f"passes/{n}/{mode}": functools.partial(pass_entries, n, mode == "train")
        for n in ("llama", "bert", "resnet", "inception", "vit")
        for mode in ("eval", "train")
    },
    **{f"files/{n}": functools.partial(file_entries, n) for n in ("mlp", "llama", "resnet")},
    "fuse options": option_entries,
    "outlining": outline_entries,
    "lowering": lower_entries,
    "schedule/net/eval": functools.partial(schedule_entries, False),
    "schedule/net/train": functools.partial(schedule_entries, True),
    "schedule/llama": functools.partial(zoo_schedule_entries, "llama", "layers.*"),
    "schedule/bert": functools.partial(zoo_schedule_entries, "bert", "layers.*"),
    "fuse modules": fuse_modules_entries,
}
