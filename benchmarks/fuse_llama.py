"""A Hugging Face Llama of sixteen layers: planned, outlined and fused, beside torch's partitioner.

    python -m benchmarks.fuse_llama [--layers 16] [--repeat 5] [--write FILE]

The model has random weights; only its graph counts. The first use of the default rules in a process traces their
patterns, so it is told apart from the later ones.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

import dovetail
from benchmarks.fuse import RULES, partitioned, plan, timed
from benchmarks.outline import floor, machine
from benchmarks.results import write_section


def captured(layers: int) -> GraphModule:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="eager",
    )
    ids = torch.randint(0, 128, (1, 16))
    return dovetail.capture(LlamaForCausalLM(config).eval(), kwargs={"input_ids": ids})


def rows(gm: GraphModule, repeat: int) -> list[tuple[str, float, int]]:
    """What was done, its seconds, and the regions it made."""
    table: list[tuple[str, float, int]] = []
    first, fused = timed(lambda: dovetail.fuse(gm))
    table.append(("fuse, default rules, first in the process", first, len(dovetail.regions(fused))))

    def both(rule: Any) -> GraphModule:
        return dovetail.outline(gm, plan(gm, rule))

    steps: dict[str, Callable[[], GraphModule]] = {
        "fuse, default rules, later": lambda: dovetail.fuse(gm),
        "plan and outline, groups": lambda: both(RULES["groups"]),
        "plan and outline, capability": lambda: both(RULES["capability"]),
        "fuse, repeats": lambda: dovetail.fuse(gm, dovetail.rules.repeats()),
        "copy floor": lambda: floor(gm),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    counts = dict.fromkeys(steps, 0)
    for _ in range(repeat):
        for name, step in steps.items():
            seconds, result = timed(step)
            times[name].append(seconds)
            counts[name] = len(dovetail.regions(result))
    table += [(name, statistics.median(times[name]), counts[name]) for name in steps]
    copy = floor(gm)
    seconds, result = timed(lambda: partitioned(copy))
    parts = sum(node.op == "call_module" for node in result.graph.nodes)
    table.append(("torch's partitioner, propose and fuse", seconds, parts))
    return table


def report(layers: int, repeat: int) -> str:
    gm = captured(layers)
    lines = [
        f"{layers} layers, {len(gm.graph.nodes):,} nodes.",
        "",
        "| step | s | regions |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {seconds:.3f} | {count:,} |" for name, seconds, count in rows(gm, repeat)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    text = f"{report(options.layers, options.repeat)}\n\n{machine()}\n"
    print(text)
    if options.write:
        write_section(options.write, "A Llama of sixteen layers, planned, outlined and fused", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
