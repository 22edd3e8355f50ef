"""What a call of a compiled model costs above the compiled code: guards, fetched weights, dispatch and outputs.

    python -m benchmarks.call_cost [--turns 40] [--write FILE]

The whole graph is traced by TorchScript, for dovetail and for torch.compile alike. Each call is measured beside the same code
called with the same operands and nothing around it, in turns, as processor time of one thread; medians of the differences.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dovetail
from benchmarks.outline import machine
from benchmarks.results import write_section
from dovetail.backends.torchscript import TorchScript
from dovetail.outlining.region import Region
from dovetail.runtime.presets import whole_graph

TITLE = "Cost of a call"
CALLS = 200
"""Calls of a sample."""
LIMITS = {"6 parameters": 10.0, "100 parameters": 25.0, "Llama 2, transformers": 40.0}
Code = Callable[..., Any]


class Recorded:
    """Compiled code that keeps the operands of its last call."""

    def __init__(self, run: Code) -> None:
        self.run, self.operands = run, ()

    def __call__(self, *operands: Any) -> Any:
        self.operands = operands
        return self.run(*operands)


class Whole(TorchScript):
    """TorchScript that keeps what it has compiled."""

    name = "recorded"
    codes: tuple[Recorded, ...] = ()

    def compile(self, region: Region, examples: Sequence[Any]) -> Any:
        code = Recorded(super().compile(region, examples))
        self.codes += (code,)
        return code


class Layers(nn.Module):
    """Linear layers one after the other, each with weight and bias."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def models() -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    x = torch.randn(4, 8)
    llama: Any = transformers.LlamaForCausalLM(config)
    built = (
        (Layers(3), (x,)),
        (Layers(50), (x,)),
        (llama, (torch.randint(0, 100, (1, 8)),)),
    )
    return {name: (model.eval(), args) for name, (model, args) in zip(LIMITS, built, strict=True)}


def by_dovetail(model: nn.Module, args: tuple[Any, ...]) -> tuple[Code, Recorded]:
    backend = Whole()
    run = dovetail.compile(model, args, backends=[backend], pipeline=[whole_graph()], cache=False)
    run(*args)
    (code,) = backend.codes
    return run, code


def by_torch(model: nn.Module, args: tuple[Any, ...]) -> tuple[Code, Recorded]:
    codes: list[Recorded] = []

    def backend(gm: Any, examples: list[Any]) -> Code:
        traced = torch.jit.trace(gm, tuple(examples), check_trace=False)
        for _ in range(3):
            traced(*examples)
        codes.append(Recorded(traced))
        return codes[-1]

    run = torch.compile(model, backend=backend, fullgraph=True)
    run(*args)
    (code,) = codes
    return run, code


def sample(run: Code, args: Sequence[Any]) -> float:
    """Microseconds of processor time for a call."""
    start = time.thread_time_ns()
    for _ in range(CALLS):
        run(*args)
    return (time.thread_time_ns() - start) / CALLS / 1e3


def row(name: str, model: nn.Module, args: tuple[Any, ...], turns: int) -> str:
    compiled = {"dovetail": by_dovetail(model, args), "torch.compile": by_torch(model, args)}
    above: dict[str, list[float]] = {method: [] for method in compiled}
    bare: list[float] = []
    for turn in range(turns + 2):
        for method, (run, code) in compiled.items():
            operands = code.operands
            alone = sample(code, operands)
            whole = sample(run, args)
            if turn > 1:  # the executor optimizes in its first runs
                above[method].append(whole - alone)
                bare.append(alone)
    cells = [f"{statistics.median(values):.1f}" for values in above.values()]
    return f"| {name} | {statistics.median(bare):.0f} | {' | '.join(cells)} | {LIMITS[name]:.0f} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        "What a call costs above the code that it runs (TorchScript of the whole graph), in µs of processor time of one thread; medians",
        f"of {options.turns} turns of {CALLS} calls each.",
        "",
        "| model | the code alone | dovetail above it | torch.compile above it | aim |",
        "|---|---|---|---|---|",
    ]
    with torch.no_grad():
        for name, (model, args) in models().items():
            lines.append(row(name, model, args, options.turns))
            print(lines[-1], file=sys.stderr, flush=True)
    report = "\n".join([*lines, "", f"CPU; {machine()}", ""])
    print(report)
    if options.write:
        write_section(options.write, TITLE, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
