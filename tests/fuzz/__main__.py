"""Look for a counterexample for as long as wanted: `python -m tests.fuzz --n 50000 --spellings 12800 --files 20000 --jobs 4`."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

from .generate import FLAVOURS
from .jobs import Finding, Tally, spread
from .stages import STAGES, Stage


def main() -> int:
    options = _options()
    warnings.simplefilter("error")
    failed = False
    for stage in STAGES:
        tally = _ran(stage, options)
        for signature, finding in tally.findings.items():
            print(f"{finding.times}x {signature}")
        missing = stage.missing(tally.counts) if tally.done == getattr(options, stage.option) > 0 else []
        print(*missing, sep="\n", end="\n" if missing else "", flush=True)
        failed |= bool(tally.findings) or bool(missing)
    return 1 if failed else 0


def _ran(stage: Stage, options: argparse.Namespace) -> Tally:
    """Do the trials of a stage, reporting each distinct failure when it is first met."""
    tally, count = Tally(), getattr(options, stage.option)
    began = last = time.monotonic()
    for tally, new in spread(stage.start, options, count, options.jobs):
        for finding in new:
            _report(finding, options.out, len(tally.findings))
        if time.monotonic() - last > 5 or tally.done == count:
            last = time.monotonic()
            rate = tally.done / (last - began)
            shown = {name: n for name, n in tally.counts.items() if "/" not in name}
            print(
                f"{tally.done}/{count} {stage.name}, {rate:.1f}/s, {shown}, {len(tally.findings)} distinct",
                flush=True,
            )
    return tally


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--n", type=int, default=50_000, help="how many programs")
    parser.add_argument("--spellings", type=int, default=12_800, help="how many spellings of library rules")
    parser.add_argument("--files", type=int, default=20_000, help="how many files")
    parser.add_argument("--seed", default="0", help="the same seed gives the same programs and files")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="processes; the programs are the same however many there are",
    )
    parser.add_argument(
        "--seconds", type=float, default=0, help="end each stage after this long, however many are left"
    )
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="folder for reproducers")
    parser.add_argument("--flavour", action="append", choices=list(FLAVOURS), help="only these; repeatable")
    return parser.parse_args()


def _report(failure: Finding, out: Path, number: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{number:03}_{failure.slug}.{'py' if failure.data is None else 'pt2'}"
    path.write_bytes(failure.script.encode() if failure.data is None else failure.data)
    print(
        f"\n===== {failure.signature} (trial {failure.label}), saved as {path}\n{failure.script}\n=====",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
