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


def results(returned: Any, count: int) -> tuple[Any, ...]:
    """Return the results of `run` as a tuple."""
    values = (returned,) if isinstance(returned, torch.Tensor) else returned
    if not isinstance(values, tuple | list):
        refused(f"`run` returned a {type(returned).__name__}; return a tensor or a tuple of {count}")
    if len(values) != count:
        refused(f"`run` returned {len(values)} results; return {count}")
    return tuple(values)


def same(actual: Any, expected: Any) -> bool:
    """Whether two tensors are equal in every element, NaN included."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    return bool(((actual == expected) | ((actual != actual) & (expected != expected))).all())


def difference(actual: Any, expected: Any, random: bool) -> str | None:
    """Return how a value differs from the expected one, or None."""
    if not isinstance(expected, torch.Tensor):
        return None if actual == expected else f"is {actual!r}, not {expected!r}"
    if not isinstance(actual, torch.Tensor):
        return f"is a {type(actual).__name__}, not a tensor"
    for what in ("dtype", "shape", "device"):
        if getattr(actual, what) != getattr(expected, what):
            return f"has {what} {getattr(actual, what)}, not {getattr(expected, what)}"
    if any(
        n > 1 and a != b for n, a, b in zip(actual.shape, actual.stride(), expected.stride(), strict=True)
    ):
        return f"has strides {actual.stride()}, not {expected.stride()}"
    if random or not expected.numel():
        return None
    if not (expected.dtype.is_floating_point or expected.dtype.is_complex):
        return (
            None if torch.equal(actual, expected) else f"differs in {int((actual != expected).sum())} places"
        )
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    has, needs = actual.detach().to(wide), expected.detach().to(wide)
    finite = needs.isfinite()
    if not torch.equal(has.isfinite(), finite):
        return "has infinities or NaN in other places"
    off, size = (has - needs).abs()[finite], needs.abs()[finite]
    if not size.numel():
        return None
    eps = torch.finfo(expected.dtype).eps
    steps = 4 * (64 if expected.dtype in (torch.float64, torch.float32) else 2)
    worst = float((off / (size + size.square().mean().sqrt() + torch.finfo(expected.dtype).tiny)).max())
    return (
        None if worst <= steps * eps else f"is off by {worst:.2g} of its size; {steps * eps:.2g} is allowed"
    )


def main() -> None:
    region = json.loads((HERE / "region.json").read_text(encoding="utf-8"))
    operands, originals, references = load("inputs.pt"), load("inputs.pt"), load("expected.pt")
    run = candidate(sys.argv[1] if len(sys.argv) > 1 else None)
    torch.manual_seed(region["seed"])
    with torch.no_grad():
        actual = results(run(*operands), len(references["results"]))
    faults: list[str] = []
    for i, (value, expected) in enumerate(zip(actual, references["results"], strict=True)):
        faults += [
            f"result {i} {reason}" for reason in [difference(value, expected, region["random"])] if reason
        ]
    for i, (value, expected) in enumerate(zip(operands, originals, strict=True)):
        if (
            isinstance(expected, torch.Tensor)
            and i not in references["operands"]
            and not same(value, expected)
        ):
            faults.append(f"operand {i} was written, and the body does not write it")
    for i, expected in references["operands"].items():
        reason = difference(operands[i], expected, region["random"])
        faults += [f"operand {i}, which the body writes, {reason}"] if reason else []
    print("\n".join(faults) if faults else f"{region['kind']}: as the body does")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
