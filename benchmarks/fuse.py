"""Planning and outlining against copying the same FX graph, and against peers.

    python -m benchmarks.fuse [--nodes 1000 10000 100000] [--repeat 3] [--peer-nodes 1000] [--tvm PYTHON] [--write FILE]

`groups` and `capability` on every shape, and a pattern of three operations on a program a quarter of which it begins.
The floor is `Graph.graph_copy` plus `GraphModule`. Every step is timed with the garbage of the one before collected,
floor, plan, outline and fuse in turns, in seconds of the process; medians of `--repeat` turns. A plan starts from the
graph alone; `fuse` is all of it, the choice and the last round that finds nothing included. Memory is the peak of
Python's own allocations, measured in a run apart. Peers are torch's CapabilityBasedPartitioner and replace_pattern, at
sizes they survive, and TVM's FuseOps and FuseOpsByPattern on the same programs, if this Python can import `tvm` or the
one given with `--tvm` can; each in a process of its own, for one of them ends in a stack overflow.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node, replace_pattern
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

import dovetail
from benchmarks.outline import floor, machine, peak_megabytes
from benchmarks.programs import PROGRAMS, QUARTERS, Program
from benchmarks.results import write_section
from benchmarks.shapes import Sketch
from dovetail.rules.partition import capability
from dovetail.rules.rule import Candidate, Rule, RuleContext
from dovetail.rules.vertical import groups

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.linear.default, aten.matmul.default)


@dovetail.rule(kind="gated")
def gated(x: torch.Tensor) -> torch.Tensor:
    """Three operations: what `programs.quarters` is made of."""
    return x * torch.sigmoid(x) + x


RULES: dict[str, Rule] = {
    "groups": groups(),
    "capability": capability(lambda node: node.target not in PRODUCTS, "taken"),
    "pattern": gated,
}
NAMED = {"sigmoid": aten.sigmoid.default, "times": aten.mul.Tensor}
_LONGEST = 120


def timed(step: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of this process and the result: what else the machine does counts less than on the wall's clock."""
    gc.collect()
    start = time.process_time()
    result = step()
    return time.process_time() - start, result


def drawn(program: Program, *, distinct: bool) -> GraphModule:
    """A program as an FX graph with the meta that exporters put on nodes."""
    sketch = Sketch(distinct=distinct)
    with FakeTensorMode():
        sketch.value = torch.empty(16, 16)
    x, w = sketch.input("x"), sketch.input("w")
    nodes: list[Node] = []
    for op, reads in program:
        given = [x if i < 0 else nodes[i] for i in reads]
        if op == "mm":
            nodes.append(sketch.call(aten.mm.default, given[0], w))
        elif op in NAMED:
            nodes.append(sketch.call(NAMED[op], *given))
        else:
            nodes.append(sketch.op(*given))
    return sketch.finish(nodes[-1])[0]


def plan(gm: GraphModule, rule: Rule) -> list[dovetail.Request]:
    """Everything a rule proposes for a graph, from the graph alone, as requests."""
    context = RuleContext(gm)
    nodes = context.nodes
    requests: list[dovetail.Request] = []
    for c in rule.propose(context):
        if isinstance(c, Candidate):
            policies = c.escapes
            if not isinstance(policies, str):
                policies = {nodes[i]: how for i, how in policies.items()}
            requests.append(dovetail.Request([nodes[i] for i in c.members], c.kind, escapes=policies))
    return requests


def measure(
    shape: str, nodes: int, rule: str, *, distinct: bool, repeat: int, memory: bool
) -> dict[str, Any]:
    gm = drawn(PROGRAMS[shape](nodes), distinct=distinct)
    times: dict[str, list[float]] = {"floor": [], "plan": [], "outline": [], "fuse": []}
    requests: list[dovetail.Request] = []
    for _ in range(repeat):
        times["floor"].append(timed(lambda: floor(gm))[0])
        seconds, requests = timed(lambda: plan(gm, RULES[rule]))
        times["plan"].append(seconds)
        times["outline"].append(timed(lambda requests=requests: dovetail.outline(gm, requests))[0])
        times["fuse"].append(timed(lambda: dovetail.fuse(gm, RULES[rule]))[0])
    row: dict[str, Any] = {k: statistics.median(v) for k, v in times.items()}
    count = len(gm.graph.nodes)
    row |= {"shape": shape, "rule": rule, "bodies": "distinct" if distinct else "equal", "nodes": count}
    row |= {"regions": len(requests), "ratio": (row["plan"] + row["outline"]) / row["floor"]}
    if memory:
        row["floor MiB"] = peak_megabytes(lambda: floor(gm))
        row["fuse MiB"] = peak_megabytes(lambda: dovetail.fuse(gm, RULES[rule]))
    return row


def table(rows: list[dict[str, Any]]) -> str:
    head = "| shape | rule | bodies | nodes | regions | floor s | plan s | µs per node | outline s | ratio¹ | growth² "
    lines = [head + "| fuse s | ratio | growth² | MiB, floor | fuse |", "|---" * 16 + "|"]
    before: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        last = before.get((row["shape"], row["rule"], row["bodies"]))
        whole = row["fuse"] / row["floor"]
        growth = ["", ""]
        if last is not None:
            growth = [f"{row['ratio'] / last['ratio']:.2f}", f"{whole / (last['fuse'] / last['floor']):.2f}"]
        cells = [row["shape"], row["rule"], row["bodies"], f"{row['nodes']:,}", f"{row['regions']:,}"]
        cells += [f"{row['floor']:.2f}", f"{row['plan']:.2f}", f"{row['plan'] / row['nodes'] * 1e6:.1f}"]
        cells += [f"{row['outline']:.2f}", f"{row['ratio']:.2f}", growth[0]]
        cells += [f"{row['fuse']:.2f}", f"{whole:.2f}", growth[1]]
        cells += [f"{row[k]:.0f}" if k in row else "" for k in ("floor MiB", "fuse MiB")]
        lines.append("| " + " | ".join(cells) + " |")
        before[row["shape"], row["rule"], row["bodies"]] = row
    lines.append("")
    lines.append(
        "¹ plan and outline together to the floor ² growth of the ratio from the row above of the same kind"
    )
    return "\n".join(lines)


class _Supported(OperatorSupportBase):
    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        return node.op == "call_function" and node.target not in PRODUCTS


def partitioned(gm: GraphModule) -> GraphModule:
    """torch's partitioner: propose and fuse, on a graph that it may edit."""
    partitioner = CapabilityBasedPartitioner(gm, _Supported(), allows_single_node_partition=False)
    return partitioner.fuse_partitions(partitioner.propose_partitions())


def replaced(gm: GraphModule) -> None:
    """torch's replace_pattern with the same three operations, on a graph that it may edit."""

    def pattern(x: torch.Tensor) -> torch.Tensor:
        return aten.add.Tensor(aten.mul.Tensor(x, aten.sigmoid.default(x)), x)

    def replacement(x: torch.Tensor) -> torch.Tensor:
        return aten.silu.default(x)

    replace_pattern(gm, pattern, replacement)


def peers(shape: str, nodes: int, *, torch_too: bool, python: str | None) -> dict[str, Any]:
    program = PROGRAMS[shape](nodes)
    gm = drawn(program, distinct=False)
    row: dict[str, Any] = {"shape": shape, "nodes": len(gm.graph.nodes)}
    if torch_too:
        name, step = ("replace_pattern", replaced) if shape == QUARTERS else ("partitioner", partitioned)
        copy = floor(gm)
        row[name] = timed(lambda: step(copy))[0]
    if python is not None:
        row |= _tvm(python, shape, nodes)
    return row


def _tvm(python: str, shape: str, nodes: int) -> dict[str, Any]:
    command = [python, "-m", "benchmarks.fuse_tvm", shape, str(nodes)]
    here = Path(__file__).parent.parent
    try:
        ran = subprocess.run(command, capture_output=True, text=True, cwd=here, timeout=_LONGEST, check=False)
    except subprocess.TimeoutExpired:
        return {"FuseOps": f"over {_LONGEST} s"}
    timings: dict[str, Any] = {}
    for line in ran.stdout.splitlines():
        if line.startswith("{"):
            timings |= json.loads(line)
    if ran.returncode:
        timings.setdefault("FuseOpsByPattern" if shape == QUARTERS else "FuseOps", "crashed")
    return timings


def peer_table(rows: list[dict[str, Any]], ours: dict[tuple[str, str, int], dict[str, Any]]) -> str:
    names = ("partitioner", "replace_pattern", "FuseOps", "FuseOpsByPattern")
    head = "| shape | nodes | groups: plan | + outline | capability: plan | + outline | pattern: plan | + outline "
    head += "| torch partitioner | torch replace_pattern | TVM FuseOps | TVM FuseOpsByPattern |"
    lines = [head, "|---" * 12 + "|"]
    for row in rows:
        cells = [row["shape"], f"{row['nodes']:,}"]
        for rule in RULES:
            own = ours.get((row["shape"], rule, row["nodes"]))
            cells += [f"{own['plan']:.3f}", f"{own['plan'] + own['outline']:.3f}"] if own else ["", ""]
        for name in names:
            value = row.get(name, "")
            cells.append(value if isinstance(value, str) else f"{value:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    lines.append("seconds; empty: not run at this size")
    return "\n".join(lines)


def _tvm_python(given: str | None) -> str | None:
    if given is not None:
        return given
    return sys.executable if importlib.util.find_spec("tvm") is not None else None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--shapes", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=list(RULES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--peer-nodes", type=int, default=1_000, help="largest graph that torch's peers are given"
    )
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--tvm", help="a Python that can import tvm, if this one cannot")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        for rule in options.rules:
            if (rule == "pattern") != (shape == QUARTERS):
                continue
            # The pattern has no literal that could make bodies differ.
            for distinct in (False,) if rule == "pattern" else (False, True):
                for nodes in sorted(options.nodes):
                    row = measure(
                        shape,
                        nodes,
                        rule,
                        distinct=distinct,
                        repeat=options.repeat,
                        memory=not options.no_memory,
                    )
                    rows.append(row)
                    _tell(
                        f"{shape:14} {rule:10} {row['bodies']:8} {row['nodes']:>7,}: {row['ratio']:.2f} x the floor"
                    )
    python = _tvm_python(options.tvm)
    if python is None:
        _tell("tvm is not installed here (extra `bench`): its columns stay empty; --tvm names another Python")
    ours = {(r["shape"], r["rule"], r["nodes"]): r for r in rows if r["bodies"] == "equal"}
    others: list[dict[str, Any]] = []
    for shape in options.shapes:
        for nodes in sorted(options.nodes):
            others.append(peers(shape, nodes, torch_too=nodes <= options.peer_nodes, python=python))
            _tell(f"{shape:14} {nodes:>7,}: peers done")
    report = f"{table(rows)}\n\n{peer_table(others, ours)}\n\n{machine()}\n"
    print(report)
    if options.write:
        write_section(
            options.write, "Planning and outlining against copying the FX graph, and against peers", report
        )
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
