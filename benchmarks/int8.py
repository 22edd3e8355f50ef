"""The backend int8 on the zoo's ResNet and BERT: error and speed against float32, eager and compiled.

    python -m benchmarks.int8 [--size base] [--repeat 20] [--threads 1] [--inputs 16] [--write FILE]

All methods run in one process, in turns, medians. Int8 is calibrated on inputs of its own; errors are those of other
ones against float32 eager: the norm of the difference over that of the result; and, which is harder, over that of what
tells one input's result from the mean of all. The same model in bfloat16 stands beside it for comparison. Top-1 is how
often the largest score is the same one, of classes or, for BERT, of a random head over each token; how many different
ones there were says what that is worth. Weights are random, images are smooth noise, and the statistics of batch
norms are those of such images, as after training.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from benchmarks.outline import machine
from benchmarks.results import write_section
from dovetail.backends.int8.int8_backend import Int8
from dovetail.zoo import bert, resnet

TITLE = "Linear layers and convolutions in int8"
METHODS = ("eager", "torch.compile", "dovetail", "int8", "int8 + inductor")
CALIBRATED_ON = 4


class Case:
    """A model in eval mode, its inputs, and what is scored of its results."""

    def __init__(self, name: str, size: str) -> None:
        self.name, self.zoo = name, bert if name == "BERT" else resnet
        self.size = size
        self.model: nn.Module = self.zoo.build(size)
        self.layout = torch.channels_last if "channels" in name else torch.contiguous_format
        if self.zoo is resnet:
            self._settle()
        if self.layout is torch.channels_last:
            self.model = self.model.to(memory_format=self.layout)
        self.model.eval()

    def _settle(self) -> None:
        """Give batch norms the statistics of some images."""
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None
        with torch.no_grad():
            for seed in range(5000, 5004):
                self.model(self._images(seed, 8))

    def _images(self, seed: int, count: int) -> Tensor:
        """Noise of all sizes from half an image to a pixel."""
        size, source = resnet.SIZES[self.size].image, torch.Generator().manual_seed(seed)
        grains = [2**k for k in range(1, 6) if 2**k < size]
        layers = [torch.randn(count, 3, n, n, generator=source) for n in grains]
        result = torch.stack([F.interpolate(layer, size=size, mode="bilinear") for layer in layers]).sum(0)
        return result + 0.2 * torch.randn(result.shape, generator=source)

    def inputs(self, seed: int) -> tuple[Any, ...]:
        if self.zoo is resnet:
            return (self._images(seed, 1).to(memory_format=self.layout),)
        given = self.zoo.example_inputs(self.size, batch=1, seed=seed)
        return (*given.args, *given.kwargs.values())

    def value(self, result: Any) -> Tensor:
        return result[0] if self.name == "BERT" else result

    def scores(self, value: Tensor) -> Tensor:
        if self.name != "BERT":
            return value
        head = torch.randn(value.shape[-1], 1000, generator=torch.Generator().manual_seed(7))
        return value.to(head.dtype) @ head


def compiled(method: str, case: Case) -> Callable[..., Any]:
    model, args = case.model, case.inputs(0)
    if method == "eager":
        return model
    if method == "torch.compile":
        return torch.compile(model)
    if method == "dovetail":
        return dovetail.compile(model, args)
    samples = [case.inputs(1000 + i) for i in range(CALIBRATED_ON)]
    chain: list[Any] = [Int8(samples)]
    return dovetail.compile(model, args, backends=chain if method == "int8" else [*chain, "inductor"])


def speeds(runs: dict[str, Callable[..., Any]], args: tuple[Any, ...], repeat: int) -> dict[str, float]:
    """Median milliseconds of each method, all in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(3):
            run(*args)
    for _ in range(repeat):
        for name, run in runs.items():
            start = time.perf_counter()
            run(*args)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


@dataclass(frozen=True)
class Errors:
    """How far off results are, what there is of the same kind in bfloat16, and how often the best one is the same."""

    relative: float
    distinguishing: float
    bfloat16: float
    top: float
    different: int
    scored: int


def errors(run: Callable[..., Any], case: Case, count: int) -> Errors:
    """How results on fresh inputs compare with those of the model."""
    narrow = copy.deepcopy(case.model).bfloat16()
    given = [case.inputs(seed) for seed in range(count)]
    expected = torch.stack([case.value(case.model(*args)) for args in given])
    result = torch.stack([case.value(run(*args)) for args in given])
    cut = [tuple(a.bfloat16() if a.is_floating_point() else a for a in args) for args in given]
    coarse = torch.stack([case.value(narrow(*args)).float() for args in cut])
    off, size = (result - expected).norm(), expected.norm()
    best, other = (case.scores(v).argmax(-1) for v in (expected, result))
    return Errors(
        float(off / size),
        float(off / (expected - expected.mean(0)).norm()),
        float((coarse - expected).norm() / size),
        float((best == other).float().mean()),
        best.unique().numel(),
        best.numel(),
    )


def summary(run: Any) -> str:
    """How many regions run in int8, and how many were kept out of it."""
    (graph,) = run.graphs
    quantized = [r for r in dovetail.regions(graph, nested=True) if r.backend == "int8"]
    kept = [e for e in dovetail.explain(graph).lowered if e.outcome == "prepare"]
    return f"{len(quantized) - len(kept)} regions in int8, {len(kept)} kept in float32"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="base", choices=["tiny", "small", "base"])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=16)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--cases", nargs="+", default=["ResNet", "ResNet, channels last", "BERT"])
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    head = [f"{m} ms" for m in options.methods]
    lines = [f"| model | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    right = ["| model | error | of what tells inputs apart | error in bfloat16 | top-1 | different ones |"]
    right += ["|---" * 6 + "|"]
    notes: list[str] = []
    for name in options.cases:
        case = Case(name, options.size)
        with torch.no_grad():
            runs = {method: compiled(method, case) for method in options.methods}
            took = speeds(runs, case.inputs(0), options.repeat)
            measured = errors(runs["int8"], case, options.inputs)
        cells = [f"{took[m]:.1f}" for m in options.methods]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        right.append(
            f"| {name} | {measured.relative:.2%} | {measured.distinguishing:.1%} | {measured.bfloat16:.2%} "
            f"| {measured.top:.1%} | {measured.different} of {measured.scored} |"
        )
        notes.append(f"{name}: {summary(runs['int8'])}.")
        print(lines[-1], right[-1], notes[-1], file=sys.stderr, flush=True)
    sizes = f"Size '{options.size}' of the zoo, batch 1, {options.threads} thread(s), medians of {options.repeat} calls."
    report = "\n".join([sizes, "", *lines, "", *right, "", *notes, "", machine(), ""])
    print(report)
    if options.write:
        write_section(options.write, TITLE, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
