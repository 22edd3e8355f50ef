"""Try every model type of transformers: `python -m tests.census --out FOLDER --jobs 16`; resumes what FOLDER has.

Each type runs in a process of its own, forked from one that has loaded torch and transformers, under a time limit.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

COLUMNS = (
    "built",
    "exports",
    "unrun",
    "captured",
    "equal",
    "faithful",
    "fused",
    "inverse",
    "gradients",
    "compiled",
)
# What is promised of every type that torch.export takes; the census fails where it does not hold.
PROMISED = ("captured", "equal", "fused", "inverse")


def main() -> int:
    options = _options()
    if options.summarize:
        return _summarize(options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "logs").mkdir(exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Children are forked, and CUDA does not survive a fork.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from dovetail.cli.transformers_config import model_types, with_base_model

    from . import stages  # loads torch, transformers and dovetail once, for all children

    rows = read(options.out) if not options.again else {}
    if options.again:
        (options.out / "results.jsonl").unlink(missing_ok=True)
    types = sorted(model_types(), key=lambda t: (t not in with_base_model(), t))
    patterns = options.only or ["*"]
    names = list(dict.fromkeys(t for p in patterns for t in types if fnmatch.fnmatch(t, p)))
    todo = [t for t in names if t not in rows or (options.retry and _failed(rows[t], options))]
    columns = tuple(c for c in COLUMNS if c in options.columns)
    print(
        f"{len(names)} model types, {len(todo)} to do, {options.jobs} at a time: {' '.join(columns)}",
        flush=True,
    )
    stages.warm_up()
    Pool(options, columns, stages.examine).run(todo)
    return _summarize(options)


class Pool:
    """At most `jobs` children at a time; the parent ends those that exceed the limit."""

    def __init__(self, options: argparse.Namespace, columns: tuple[str, ...], examine: Any) -> None:
        self.options, self.columns, self.examine = options, columns, examine
        self.fork = multiprocessing.get_context("fork")
        self.running: dict[Connection, tuple[str, Any, float, dict[str, Any]]] = {}
        self.done = 0
        self.again: set[str] = set()

    def run(self, todo: list[str]) -> None:
        began, queue = time.monotonic(), list(reversed(todo))
        with (self.options.out / "results.jsonl").open("a") as file:
            while queue or self.running:
                while queue and len(self.running) < self.options.jobs:
                    self._start(queue.pop())
                for row in self._finished():
                    # Threads of torch's own may fail to start in a process that was forked; once more tells.
                    if row["type"] not in self.again and "process ended with -" in str(row.values()):
                        self.again.add(row["type"])
                        queue.append(row["type"])
                        continue
                    self.done += 1
                    file.write(json.dumps(row) + "\n")
                    file.flush()
                    print(
                        f"{self.done}/{len(todo)} {time.monotonic() - began:.0f} s  {_line(row)}", flush=True
                    )

    def _start(self, name: str) -> None:
        mine, theirs = self.fork.Pipe(duplex=False)
        log = self.options.out / "logs" / f"{name}.log"
        child = self.fork.Process(
            target=_child,
            args=(name, self.columns, self.options.backends, theirs, log, self.examine),
            daemon=True,
        )
        child.start()
        theirs.close()
        self.running[mine] = (name, child, time.monotonic(), {"type": name})

    def _finished(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        ready = set(wait(list(self.running), timeout=0.5))
        for pipe, (_, child, began, row) in list(self.running.items()):
            over = time.monotonic() - began > self.options.limit_seconds
            ended = False
            if pipe in ready:
                try:
                    key, value = pipe.recv()
                    row[key] = value
                except EOFError:
                    ended = True
            if ended or over:
                if over and not ended:
                    child.kill()
                child.join()
                stage = row.pop("stage", "built")
                if stage not in row:
                    code = child.exitcode
                    row[stage] = (
                        f"over {self.options.limit_seconds} s" if over else f"process ended with {code}"
                    )
                row["seconds"] = round(time.monotonic() - began, 1)
                pipe.close()
                del self.running[pipe]
                rows.append(row)
        return rows


def _child(
    name: str, columns: tuple[str, ...], backends: list[str], pipe: Connection, log: Path, examine: Any
) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    examine(name, columns, backends, lambda key, value: pipe.send((key, value)))
    pipe.close()
    # Without the interpreter's teardown, which takes longer than many a stage.
    os._exit(0)


def _failed(row: dict[str, Any], options: argparse.Namespace) -> bool:
    return any(row.get(c) is not True for c in COLUMNS if c in options.columns)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / "results.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def _line(row: dict[str, Any]) -> str:
    shown = [f"{c}" if row.get(c) is True else f"{c}: {str(row[c])[:160]}" for c in COLUMNS if c in row]
    return f"{row['type']} ({row['seconds']} s): {', '.join(shown)}"


def _summarize(options: argparse.Namespace) -> int:
    from .summary import write

    rows = read(options.out)
    print(write(options.out, rows, options.write))
    broken = [name for name, row in rows.items() if row.get("exports") is True and not _holds(row, options)]
    if broken:
        print(f"torch.export takes these, and not all of {' '.join(PROMISED)} holds: {' '.join(broken)}")
    return int(bool(broken))


def _holds(row: dict[str, Any], options: argparse.Namespace) -> bool:
    return all(row.get(column) is True for column in PROMISED if column in options.columns)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.census", description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for results.jsonl, logs and summary.md"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="*", help="model types, as glob patterns")
    parser.add_argument("--limit-seconds", type=float, default=120)
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=COLUMNS)
    parser.add_argument(
        "--torch-export-only", dest="columns", action="store_const", const=["built", "exports"]
    )
    parser.add_argument("--backends", nargs="*", default=[], help="for the last column; none by default")
    parser.add_argument("--again", action="store_true", help="forget the results that the folder has")
    parser.add_argument("--retry", action="store_true", help="try those again that failed in a column")
    parser.add_argument("--summarize", action="store_true", help="only summarize what the folder has")
    parser.add_argument(
        "--write", type=Path, help="also write the table into this file, as a section of its own"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
