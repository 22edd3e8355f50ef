"""Outlining and inlining against copying the same FX graph, in one run.

    python -m benchmarks.outline [--nodes 1000 10000 100000] [--repeat 3] [--write benchmarks/RESULTS.md]

The floor is `Graph.graph_copy` plus `GraphModule`. A quarter of the nodes go into regions of four. Every step is
timed with the garbage of the one before collected, floor and step in turns; medians of `--repeat` turns.
Memory is the growth of Python's own allocations, measured in a run apart.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

import dovetail
from benchmarks.results import write_section
from benchmarks.shapes import SHAPES


def floor(gm: GraphModule) -> GraphModule:
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)


def timed(step: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = time.perf_counter()
    result = step()
    return time.perf_counter() - start, result


def peak_megabytes(step: Callable[[], Any]) -> float:
    gc.collect()
    tracemalloc.start()
    result = step()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del result
    return peak / 2**20


def measure(shape: str, nodes: int, *, distinct: bool, repeat: int, memory: bool) -> dict[str, Any]:
    gm, quads = SHAPES[shape](nodes, distinct=distinct)
    requests = [dovetail.Request(quad, kind="quad") for quad in quads]
    times: dict[str, list[float]] = {"floor": [], "outline": [], "inline": [], "first run": []}
    result: Any = None
    x = torch.randn(8, 16)
    for _ in range(repeat):
        times["floor"].append(timed(lambda: floor(gm))[0])
        seconds, result = timed(lambda: dovetail.outline(gm, requests))
        times["outline"].append(seconds)
        times["inline"].append(timed(lambda result=result: dovetail.inline(result))[0])
        times["first run"].append(timed(lambda result=result: result(x))[0])
    row: dict[str, Any] = {k: statistics.median(v) for k, v in times.items()}
    row |= {"shape": shape, "nodes": len(gm.graph.nodes), "bodies": "distinct" if distinct else "equal"}
    row["distinct bodies"] = len({id(r.body) for r in dovetail.regions(result)})
    if memory:
        row["floor MiB"] = peak_megabytes(lambda: floor(gm))
        row["outline MiB"] = peak_megabytes(lambda: dovetail.outline(gm, requests))
    return row


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "| shape | bodies | nodes | floor s | outline s | ratio | growth¹ | inline s | ratio | growth¹ "
        "| first run s | MiB, floor | outline |"
    )
    lines = [head, "|---" * 13 + "|"]
    before: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        last = before.get((row["shape"], row["bodies"]))
        growth = ["", ""]
        if last is not None:
            own = row["floor"] / last["floor"]
            growth = [f"{row[k] / last[k] / own:.2f}" for k in ("outline", "inline")]
        cells = [
            row["shape"],
            row["bodies"],
            f"{row['nodes']:,}",
            f"{row['floor']:.2f}",
            f"{row['outline']:.2f}",
        ]
        cells += [f"{row['outline'] / row['floor']:.2f}", growth[0], f"{row['inline']:.2f}"]
        cells += [f"{row['inline'] / row['floor']:.2f}", growth[1], f"{row['first run']:.2f}"]
        cells += [f"{row[k]:.0f}" if k in row else "" for k in ("floor MiB", "outline MiB")]
        lines.append("| " + " | ".join(cells) + " |")
        before[row["shape"], row["bodies"]] = row
    lines.append("")
    lines.append("¹ growth from the row above of the same shape, relative to the floor's own growth")
    return "\n".join(lines)


def machine() -> str:
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _read("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return (
        f"{cpu}, {torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}, "
        f"dovetail {dovetail.__version__}"
    )


def _read(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        for distinct in (False, True):
            for nodes in sorted(options.nodes):
                row = measure(
                    shape, nodes, distinct=distinct, repeat=options.repeat, memory=not options.no_memory
                )
                rows.append(row)
                print(
                    f"{shape:14} {row['bodies']:9} {row['nodes']:>7,} nodes: outline {row['outline'] / row['floor']:.2f} x, "
                    f"inline {row['inline'] / row['floor']:.2f} x the floor of {row['floor']:.2f} s",
                    file=sys.stderr,
                    flush=True,
                )
    report = f"{table(rows)}\n\n{machine()}\n"
    print(report)
    if options.write:
        write_section(options.write, "Outlining and inlining against copying the FX graph", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
