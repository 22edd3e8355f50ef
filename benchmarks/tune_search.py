"""How well the search of `dovetail.tune` searches: depth, warm stores, applying a plan, regret, winners that flip.

    python -m benchmarks.tune_search [--parts depth warm apply regret fleet] [--retunings 12] [--write FILE]

Depth: levels 1 and 2 of a Llama of 4 and of 48 layers, everything measured. Warm: the same search again. Apply: compiling with a
plan and with the same backend without one, in turns. Regret: every program of a small space measured, and the winners of
several searches with empty stores compared with the best of all, interleaved. Fleet: the time to the same plan with more workers, on
a device with planted costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dovetail
from benchmarks.results import write_section
from dovetail.tuning.decisions import GraphDecision, RegionChoice, Spread
from dovetail.tuning.division_search import BlockChoice, DivisionSearch
from dovetail.tuning.environment import current_environment
from dovetail.tuning.executor import InProcess, LocalExecutor
from dovetail.tuning.measuring import Measurer
from dovetail.tuning.model_programs import ModelPrograms
from dovetail.tuning.preparation import Prepared, prepare
from dovetail.tuning.program_search import ProgramSearch
from dovetail.tuning.store import Store
from dovetail.tuning.timing import Timer, compare, noise_of
from dovetail.tuning.trial import BlockDivision, ComparisonTrial, DivisionsTrial, ProgramSpec
from dovetail.tuning.tune import run_search

TITLE = "The search of tune: depth, warm stores, regret"
BACKEND = "openvino"
_CHUNK = 12
_BEST = 6
_BUDGET = 40


class Chain(nn.Module):
    """A few operations whose divisions can all be measured."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x)) * 0.5
        return torch.tanh(self.last(torch.nn.functional.gelu(self.middle(y)))) + x


def llama(layers: int) -> tuple[nn.Module, tuple[Any, ...]]:
    from transformers import LlamaConfig, LlamaModel

    from benchmarks.backends_models import Only

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return Only(LlamaModel(config), "last_hidden_state").eval(), (torch.randint(0, 1000, (1, 64)),)


def levels(layers: int) -> dict[str, float]:
    """Return the seconds and the number of measurements of levels 1 and 2, all of them taken."""
    model, args = llama(layers)
    start = time.perf_counter()
    ready = prepare(model, args, None, [BACKEND])
    preparing = time.perf_counter() - start
    with Store("sqlite://") as store:
        executor = LocalExecutor(ready.tuned, ready.backends)
        try:
            for space in ready.space.blocks.values():
                executor.add_block(space.block)
            measurer = Measurer(store, ready.environment, executor, budget=3600.0)
            blocks = DivisionSearch(ready.space, "inference", measurer)
            start = time.perf_counter()
            keys = list(ready.space.blocks)
            blocks.measure_coarse(keys, 1.0)
            blocks.measure_candidates(keys, 1.0)
            blocks.measure_boundaries(keys, 1.0)
            blocks.choose(keys, 1.0)
            seconds = time.perf_counter() - start
        finally:
            executor.close()
    return {"seconds": seconds, "measured": measurer.measured, "preparing": preparing, "blocks": len(keys)}


def depth_lines() -> list[str]:
    rows = {layers: levels(layers) for layers in (4, 48)}
    lines = [
        "| layers | capture and search space s | distinct blocks | measurements | levels 1 and 2 s |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {n} | {r['preparing']:.1f} | {r['blocks']:.0f} | {r['measured']:.0f} | {r['seconds']:.1f} |"
        for n, r in rows.items()
    ]
    ratio = rows[48]["seconds"] / rows[4]["seconds"]
    return [*lines, "", f"48 layers take {ratio:.2f} times the time of 4 (wanted: at most 1.3)."]


def warm_lines() -> list[str]:
    model, args = llama(4)
    with tempfile.TemporaryDirectory() as folder:
        seconds: list[float] = []
        plans: list[str] = []
        for _ in range(2):
            start = time.perf_counter()
            plan = dovetail.tune(
                model, args, budget=90, store=Path(folder) / "s.db", backends=[BACKEND], progress=False
            )
            seconds.append(time.perf_counter() - start)
            plans.append(plan.to_json())
    same = "byte-equal" if plans[0] == plans[1] else "another plan"
    return [
        f"A Llama of 4 layers, budget 90 s: {seconds[0]:.1f} s with an empty store, {seconds[1]:.1f} s with its own "
        f"({seconds[1] / seconds[0]:.3f} of it, wanted: a tenth), {same}."
    ]


def apply_lines() -> list[str]:
    """Return the times to compile with a plan of regions, with the same backend without one, and of applying alone."""
    model, args = llama(4)
    ready = prepare(model, args, None, [BACKEND])
    plan = _plan_of_blocks(ready)
    with_plan: list[float] = []
    without: list[float] = []
    for _ in range(4):
        for times, given in ((with_plan, plan), (without, None)):
            start = time.perf_counter()
            dovetail.compile(model, args, backends=[BACKEND], plan=given)
            times.append(time.perf_counter() - start)
    a, b = (statistics.median(times[1:]) for times in (with_plan, without))
    return [
        f"Compiling a Llama of 4 layers: {a:.2f} s with a plan, {b:.2f} s without (wanted: at most 1 s more)."
    ]


def _plan_of_blocks(ready: Prepared) -> dovetail.Plan:
    """Return a plan that has each block of the graph as a whole by the backend."""
    with Store("sqlite://") as store:
        search = _programs(ready, store)
        choices = {key: _block_choice(ready, key) for key in ready.space.states[0].blocks}
        return search._plan(GraphDecision(""), choices)


def _block_choice(ready: Prepared, key: str) -> BlockChoice:
    space = ready.space.blocks[key]
    taken = [c for i, c in enumerate(space.candidates) if i in space.backends]
    regions = tuple(
        (c.choice, ready.space.backend(BACKEND)) for c in taken if len(c.units) == len(space.block.units)
    )[:1]
    return BlockChoice(BlockDivision(regions), Spread(0.0, 0.0, 0.0, 1), 0.0, None)


def _programs(ready: Prepared, store: Store) -> ProgramSearch:
    measurer = Measurer(store, ready.environment, InProcess(ready.tuned, ready.backends), budget=3600.0)
    blocks = DivisionSearch(ready.space, "inference", measurer)
    return ProgramSearch(
        ready.space,
        blocks,
        measurer,
        mode="inference",
        operands=ready.operands,
        environment=ready.environment,
    )


def divisions(ready: Prepared, key: str) -> Iterator[BlockDivision]:
    """Yield every set of disjoint candidates of a block, by every backend."""
    candidates = [c.choice for c in ready.space.blocks[key].candidates]
    units = [c.units for c in ready.space.blocks[key].candidates]

    def extend(start: int, taken: frozenset[int], chosen: list[RegionChoice]) -> Iterator[list[RegionChoice]]:
        yield chosen
        for i in range(start, len(candidates)):
            if taken.isdisjoint(units[i]):
                yield from extend(i + 1, taken | units[i], [*chosen, candidates[i]])

    for chosen in extend(0, frozenset(), []):
        for backends in itertools.product(ready.space.backends, repeat=len(chosen)):
            yield BlockDivision(tuple(zip(chosen, backends, strict=True)))


def exhaustive(ready: Prepared) -> tuple[list[ProgramSpec], int]:
    """Return the best programs of all divisions of the only block, measured in chunks, and how many there are."""
    ((key, block),) = ready.space.states[0].blocks.items()
    every = [d for d in divisions(ready, key) if d.regions]
    executor = LocalExecutor(ready.tuned, ready.backends)
    ratios: list[tuple[float, int]] = []
    try:
        executor.add_block(block)
        for start in range(0, len(every), _CHUNK):
            chunk = tuple(every[start : start + _CHUNK])
            measured = executor.measure(DivisionsTrial("inference", key, "", chunk, str(start)), 600)
            assert measured is not None
            details: Any = measured.details
            for n, samples in details["divisions"].items():
                pairs = zip(samples, measured.samples, strict=True)
                ratios.append((statistics.median(a / b for a, b in pairs), start + int(n)))
    finally:
        executor.close()
    with Store("sqlite://") as store:
        search = _programs(ready, store)
        best = [every[i] for _, i in sorted(ratios)[:_BEST]]
        choices = [BlockChoice(d, Spread(0.0, 0.0, 0.0, 1), 0.0, None) for d in best]
        candidates = [
            search._candidate(f"division {i}", GraphDecision(""), 4, None, {key: choice})
            for i, choice in enumerate(choices)
        ]
    return [candidate.program for candidate in candidates], len(every)


def head_to_head(ready: Prepared, programs: Sequence[ProgramSpec], seconds: float) -> dict[str, list[float]]:
    tuned = ready.tuned
    runs = ModelPrograms(
        tuned.model, tuned.args, tuned.kwargs, "inference", ready.backends, Timer(torch.device("cpu"))
    )
    trial = ComparisonTrial("inference", "", "", tuple(programs), "", seconds=seconds)
    with torch.no_grad():
        details: Any = runs.compare(trial).details
    return {**details["programs"], "again": details["again"]}


def regret_lines(retunings: int) -> list[str]:
    torch.manual_seed(0)
    model, args = Chain().eval(), (torch.randn(64, 512),)
    ready = prepare(model, args, None, [BACKEND])
    best, count = exhaustive(ready)
    winners: list[ProgramSpec] = []
    correlations: list[float] = []
    for seed in range(retunings):
        ready = prepare(model, args, None, [BACKEND])
        with Store("sqlite://") as store:
            searched = run_search(ready, store, budget=_BUDGET, seed=seed, progress=False)
        if searched.outcome is not None:
            winners.append(searched.outcome.winner.program)
        if searched.report.rank_correlation is not None:
            correlations.append(searched.report.rank_correlation)
    distinct = {p.key: p for p in [*winners, *best]}
    samples = head_to_head(ready, list(distinct.values()), 120.0)
    first = next(iter(distinct))
    noise = noise_of(samples[first], samples["again"])
    fastest = min(distinct, key=lambda key: statistics.median(samples[key]))
    regrets = [compare(samples[w.key], samples[fastest], noise) for w in winners]
    flips = sum(compare(samples[w.key], samples[winners[0].key], noise).verdict == "slower" for w in winners)
    flips += sum(compare(samples[w.key], samples[winners[0].key], noise).verdict == "faster" for w in winners)
    ratios = sorted(c.ratio - 1 for c in regrets)
    correlation = f"{statistics.median(correlations):.2f}" if correlations else "not known"
    return [
        f"{count} divisions of one block by {BACKEND}, all measured; {len(winners)} searches of {_BUDGET} s with empty stores. "
        f"Regret against the fastest of all: median {statistics.median(ratios):.1%}, largest {ratios[-1]:.1%} (noise "
        f"{noise:.1%}, wanted: at most 2 %). {len({w.key for w in winners})} distinct winners, {flips} of {len(winners)} "
        f"unlike the first beyond the noise (wanted: at most 5 %). Rank correlation of costs with whole blocks, median: "
        f"{correlation}."
    ]


def fleet_lines() -> list[str]:
    """The time to the same plan with one, two and four workers, which wait where others measure."""
    rows: list[str] = []
    for name, module in (("by hand", "queue_processes"), ("on Ray", "ray_processes")):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", f"tests.tuning.{module}", "scaling", folder]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
        happened = json.loads(done.stdout.splitlines()[-1])
        one, two, four = happened["seconds"]
        ratios = f"{one / two:.2f} | {one / four:.2f} | {'yes' if happened['plans are equal'] else 'no'}"
        rows.append(f"| {name} | {one:.1f} | {two:.1f} | {four:.1f} | {ratios} |")
    return [
        "## Searches on a fleet",
        "",
        "| workers | 1: s | 2: s | 4: s | 2: times | 4: times | plans equal a local one |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]


PARTS = {"depth": depth_lines, "warm": warm_lines, "apply": apply_lines, "fleet": fleet_lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", default=["depth", "warm", "apply", "regret", "fleet"])
    parser.add_argument("--retunings", type=int, default=12)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    here = current_environment()
    lines = [f"Measured on {here.device}, {here.threads} threads, torch {here.torch}."]
    for part in options.parts:
        lines += ["", *(regret_lines(options.retunings) if part == "regret" else PARTS[part]())]
        print("\n".join(lines), flush=True)
    if options.write is not None:
        write_section(options.write, TITLE, "\n".join(lines))


if __name__ == "__main__":
    main()
