"""Compare a candidate with the body of this region: `python check.py candidate.py`. Needs torch alone.

The candidate is a file with a function `run(*operands)` that takes the operands in the order of region.json and returns
the results as a tensor or a tuple. Without one the body itself is run, from body.pt2.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent


def load(name: str) -> Any:
    return torch.load(HERE / name, weights_only=True)


def candidate(path: str | None) -> Any:
    if path is None:
        return torch.export.load(HERE / "body.pt2").module()
    if not Path(path).is_file():
        return refused(f"there is no file {path}")
    run = runpy.run_path(path).get("run")
    return run if callable(run) else refused(f"{path} has no function `run`")


def refused(reason: str) -> Any:
    print(reason)
    sys.exit(1)


def results(made: Any, count: int) -> tuple[Any, ...]:
    """What `run` returned, as a tuple."""
    found = (made,) if isinstance(made, torch.Tensor) else made
    if not isinstance(found, tuple | list):
        refused(f"`run` returned a {type(made).__name__}; a tensor or a tuple of {count} is wanted")
    if len(found) != count:
        refused(f"`run` returned {len(found)} results; {count} are wanted")
    return tuple(found)


def same(made: Any, wanted: Any) -> bool:
    """Whether two tensors are alike in every element, NaN included."""
    if (made.shape, made.dtype) != (wanted.shape, wanted.dtype):
        return False
    return bool(((made == wanted) | ((made != made) & (wanted != wanted))).all())


def wrong(made: Any, wanted: Any, random: bool) -> str | None:
    """What is wrong with a value, in words; None if nothing is."""
    if not isinstance(wanted, torch.Tensor):
        return None if made == wanted else f"is {made!r}, not {wanted!r}"
    if not isinstance(made, torch.Tensor):
        return f"is a {type(made).__name__}, not a tensor"
    for what in ("dtype", "shape", "device"):
        if getattr(made, what) != getattr(wanted, what):
            return f"has {what} {getattr(made, what)}, not {getattr(wanted, what)}"
    if any(n > 1 and a != b for n, a, b in zip(made.shape, made.stride(), wanted.stride(), strict=True)):
        return f"has strides {made.stride()}, not {wanted.stride()}"
    if random or not wanted.numel():
        return None
    if not (wanted.dtype.is_floating_point or wanted.dtype.is_complex):
        return None if torch.equal(made, wanted) else f"differs in {int((made != wanted).sum())} places"
    wide = torch.complex128 if wanted.dtype.is_complex else torch.float64
    has, needs = made.detach().to(wide), wanted.detach().to(wide)
    finite = needs.isfinite()
    if not torch.equal(has.isfinite(), finite):
        return "has infinities or NaN in other places"
    off, size = (has - needs).abs()[finite], needs.abs()[finite]
    if not size.numel():
        return None
    eps = torch.finfo(wanted.dtype).eps
    steps = 4 * (64 if wanted.dtype in (torch.float64, torch.float32) else 2)
    worst = float((off / (size + size.square().mean().sqrt() + torch.finfo(wanted.dtype).tiny)).max())
    return (
        None if worst <= steps * eps else f"is off by {worst:.2g} of its size; {steps * eps:.2g} is allowed"
    )


def main() -> None:
    told = json.loads((HERE / "region.json").read_text(encoding="utf-8"))
    operands, given, expected = load("inputs.pt"), load("inputs.pt"), load("expected.pt")
    run = candidate(sys.argv[1] if len(sys.argv) > 1 else None)
    torch.manual_seed(told["seed"])
    with torch.no_grad():
        made = results(run(*operands), len(expected["results"]))
    faults: list[str] = []
    for i, (value, wanted) in enumerate(zip(made, expected["results"], strict=True)):
        faults += [f"result {i} {reason}" for reason in [wrong(value, wanted, told["random"])] if reason]
    for i, (value, wanted) in enumerate(zip(operands, given, strict=True)):
        if isinstance(wanted, torch.Tensor) and i not in expected["operands"] and not same(value, wanted):
            faults.append(f"operand {i} was written, which the body leaves as it is")
    for i, wanted in expected["operands"].items():
        reason = wrong(operands[i], wanted, told["random"])
        faults += [f"operand {i}, which is written, {reason}"] if reason else []
    print("\n".join(faults) if faults else f"{told['kind']}: as the body does")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
