"""Capture a small Llama, fuse it by rules, ask why, take everything back, and compile it.

Run it with `make demo`. It exits with 1 if anything disagrees.
"""

import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch.fx import GraphModule, Node

import dovetail
from dovetail import zoo

SHOWN = ("layers.0.mlp_norm", "layers.0.mlp")
ASKED = ("linear_6", "mul_8")

T = TypeVar("T")


def main() -> int:
    entry = zoo.get("llama")
    model = entry.build().eval()
    inputs = entry.example_inputs()

    say("1. capture: the zoo's tiny Llama as a graph")
    before, seconds = timed(lambda: dovetail.capture(model, inputs.args, inputs.kwargs))
    original = dovetail.text(before)
    print(f"   {len(before.graph.nodes)} nodes in {seconds:.1f} s. Its first MLP, with the norm before it:\n")
    print(excerpt(original, [node.name for path in SHOWN for node in operations(before, path)]))

    say("2. fuse: the default rules propose, one choice is made, one sweep moves the operations")
    after, seconds = timed(lambda: dovetail.fuse(before))
    all_regions = dovetail.regions(after)
    print(f"   {len(all_regions)} regions in {seconds:.1f} s, {len(after.graph.nodes)} nodes left.")
    print("   Weights are operands, so equal computations share one body:\n")
    print(table(all_regions))
    print("\n   The same place of the graph now, and the bodies called there:\n")
    print(excerpt(dovetail.text(after), shown_calls(all_regions)))

    say("3. explain: what was decided, and why not something else")
    log = dovetail.explain(after)
    print(indented(str(log).split("times declined")[0].rsplit("\n", 1)[0]))
    first, second = ASKED
    print(f"\n   Why are {first} and {second} not in one region?\n")
    print(indented(str(log.why_not(first, second))))

    say("4. nothing changed")
    with torch.no_grad():
        expected = model(*inputs.args, **inputs.kwargs)
        once = before(*inputs.args, **inputs.kwargs)
        outlined = after(*inputs.args, **inputs.kwargs)
    dovetail.check(after)
    restored = dovetail.inline(after)
    failed = verdict(
        {
            "the captured graph computes what the model does, bit for bit": torch.equal(once, expected),
            "the graph with regions computes the same, bit for bit": torch.equal(outlined, expected),
            "inlining gives back the text of the original graph": dovetail.text(restored) == original,
            "the graph that was fused is as it was": dovetail.text(before) == original,
        }
    )

    say("5. compile: the same model, its equal layers one body, that body compiled once")
    fast, seconds = timed(lambda: dovetail.compile(model, inputs.args, inputs.kwargs))
    for entry in dovetail.explain(fast.graphs[0]).lowered:
        how = {"compiled": "compiled", "disk": "read from the cache"}.get(
            entry.outcome, f"not used: {entry.reason}"
        )
        print(
            f"   {entry.region:<8} {entry.calls} call{'s' if entry.calls > 1 else ' '}  {entry.backend}: {how}"
        )
    with torch.no_grad():
        close = torch.allclose(fast(*inputs.args, **inputs.kwargs), expected, rtol=1e-4, atol=1e-5)
        slow, quick = in_turns(
            lambda: model(*inputs.args, **inputs.kwargs), lambda: fast(*inputs.args, **inputs.kwargs)
        )
    print(
        f"   {seconds:.1f} s to compile; eager {slow:.2f} ms, compiled {quick:.2f} ms a call (medians, in turns)"
    )
    return failed or verdict({"the compiled model computes the same within float tolerance": close})


def operations(gm: GraphModule, path: str) -> list[Node]:
    """The operations that were called by the module at `path`, or by a module inside it."""
    return [
        node
        for node in gm.graph.nodes
        if any(at == path for at, _ in node.meta.get("nn_module_stack", {}).values())
    ]


def table(all_regions: list[dovetail.Region]) -> str:
    """One line per region: its name, its operations, where it came from, and its body."""
    rows = [("region", "operations", "module", "body")]
    for region in all_regions:
        rows.append((region.name, str(len(region.nodes)), place(region), region.key[:8]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(f"  {line.rstrip()}" for line in lines)


def place(region: dovetail.Region) -> str:
    """The innermost module that the call's operations came from."""
    stack = region.node.meta.get("nn_module_stack")
    return list(stack.values())[-1][0] if stack else ""


def shown_calls(all_regions: list[dovetail.Region]) -> list[str]:
    """The calls that stand for the operations shown before, with their results."""
    chosen = [region for region in all_regions if place(region) in SHOWN]
    return [node.name for region in chosen for node in (region.node, *region.outputs)]


def excerpt(text: str, names: Iterable[str]) -> str:
    """A graph's text with only the lines of some nodes, and whole the bodies that those call."""
    keep = set(names)
    graph, *bodies = text.rstrip("\n").split("\n\n")
    lines: list[str] = []
    cut = 0
    for line in graph.splitlines():
        name = re.match(r"  %(\w+)", line)
        if line.startswith(" ") and (name is None or name[1] not in keep):
            cut += 1
            continue
        lines += elided(cut)
        cut = 0
        lines.append(f"  {line}")
    lines += elided(cut)
    called = set(re.findall(r" @(\w+)", "\n".join(lines)))
    shown = [indented(body) for body in bodies if re.split(r"\W+", body.split("@", 1)[1])[0] in called]
    return fitted("\n\n".join(["\n".join(lines), *shown]))


def elided(count: int) -> list[str]:
    return [f"    ... {count} line{'s' if count > 1 else ''}"] if count else []


def indented(block: str) -> str:
    return "\n".join(f"  {line}" for line in block.splitlines())


def fitted(block: str) -> str:
    """Lines cut to the width of the terminal, so that the columns stay readable."""
    width = max(shutil.get_terminal_size((160, 24)).columns, 60)
    return "\n".join(line if len(line) <= width else f"{line[: width - 3]}..." for line in block.splitlines())


def in_turns(
    first: Callable[[], object], second: Callable[[], object], turns: int = 30
) -> tuple[float, float]:
    """Median milliseconds of two things done in turns, so that whatever else the machine does slows both."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for work, spent in zip((first, second), times, strict=True):
            spent.append(timed(work)[1])
    return statistics.median(times[0]) * 1e3, statistics.median(times[1]) * 1e3


def timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def say(heading: str) -> None:
    print(f"\n{heading}")


def verdict(claims: dict[str, bool]) -> int:
    for claim, holds in claims.items():
        print(f"   {'ok     ' if holds else 'DIFFERS'}  {claim}")
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
