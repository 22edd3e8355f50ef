"""Look for a counterexample for as long as wanted: `python -m tests.fuzz --n 50000 --seed 0`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from random import Random

from .generate import FLAVOURS
from .hunt import Found, draw, hunt

TOO_LONG = 120  # seconds for one program, shrinking included: whatever hangs is a finding too


def main() -> int:
    options = _options()
    signal.signal(signal.SIGALRM, _give_up)
    warnings.simplefilter("error")
    counts: Counter[str] = Counter()
    found: dict[str, Found] = {}
    began = said = time.monotonic()
    wanted = [f for f in FLAVOURS.values() if f.name in (options.flavour or FLAVOURS)]
    names = [f.name for i in range(max(f.share for f in wanted)) for f in wanted if i < f.share]
    for i in range(options.n):
        name = names[i % len(names)]
        signal.setitimer(signal.ITIMER_REAL, TOO_LONG)
        failure = hunt(lambda i=i, name=name: draw(Random(f"{options.seed}/{i}"), name), counts, known=found)
        if failure is not None and failure.signature not in found:
            found[failure.signature] = failure
            _report(failure, f"{options.seed}/{i} {name}", options.out, len(found))
        if time.monotonic() - said > 5 or i + 1 == options.n:
            said = time.monotonic()
            rate = (i + 1) / (said - began)
            print(
                f"{i + 1}/{options.n} programs, {rate:.1f}/s, {dict(counts)}, {len(found)} distinct",
                flush=True,
            )
        if options.seconds and time.monotonic() - began > options.seconds:
            break
    for signature, failure in found.items():
        print(f"{failure.times}x {signature}")
    return 1 if found else 0


def _give_up(*_: object) -> None:
    raise TimeoutError(f"not done after {TOO_LONG} seconds")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--n", type=int, default=50_000, help="how many programs")
    parser.add_argument("--seed", default="0", help="the same seed gives the same programs")
    parser.add_argument(
        "--seconds", type=float, default=0, help="stop after this long, however many are left"
    )
    parser.add_argument("--out", type=Path, default=Path("fuzz-failures"), help="folder for reproducers")
    parser.add_argument("--flavour", action="append", choices=list(FLAVOURS), help="only these; repeatable")
    return parser.parse_args()


def _report(failure: Found, label: str, out: Path, number: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{number:03}_{failure.slug}.py"
    path.write_text(failure.script)
    print(
        f"\n===== {failure.signature} (program {label}), saved as {path}\n{failure.script}\n=====", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
