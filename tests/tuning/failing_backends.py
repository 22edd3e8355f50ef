"""Backends that fail in the ways that compilers do, importable by worker processes."""

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from dovetail.lowering.backend_protocol import Backend
from dovetail.outlining.region import Region


class _Takes(Backend):
    smallest = 1
    trains = True

    def supports(self, region: Region) -> Any:
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Any:
        return region.body.forward


class Works(_Takes):
    name = "works"


class Raises(_Takes):
    name = "raises"

    def compile(self, region: Region, examples: Sequence[Any]) -> Any:
        raise RuntimeError("no kernel for this")


class Crashes(_Takes):
    name = "crashes"

    def compile(self, region: Region, examples: Sequence[Any]) -> Any:
        os.abort()


class Hangs(_Takes):
    name = "hangs"

    def compile(self, region: Region, examples: Sequence[Any]) -> Any:
        time.sleep(1000)


class Loops(_Takes):
    """Never ends, in Python code."""

    name = "loops"

    def compile(self, region: Region, examples: Sequence[Any]) -> Any:
        while True:
            time.sleep(0.001)


class LoopsOn(_Takes):
    """Never ends, and goes on after the first error that it gets."""

    name = "loops_on"

    def compile(self, region: Region, examples: Sequence[Any]) -> Any:
        with contextlib.suppress(Exception):
            time.sleep(1000)
        time.sleep(1000)


class IsWrong(_Takes):
    """Fast because it computes nothing."""

    name = "is_wrong"

    def compile(self, region: Region, examples: Sequence[Any]) -> Any:
        with torch.no_grad():
            results = [torch.zeros_like(r) for r in region.body(*(torch.zeros(e.shape) for e in examples))]
        return lambda *operands: tuple(results)


class ExhaustsMemory(_Takes):
    name = "exhausts_memory"

    def compile(self, region: Region, examples: Sequence[Any]) -> Any:
        return lambda *operands: (torch.empty(2**50),)
