"""Trials: what is measured, each as a value that is sent to a worker process, and what identifies it in the store.

A trial names blocks and the model by key; the process that runs it has loaded them before. Times of different trials are
never compared directly: each has samples of a reference taken in the same rounds, and the costs of a block are ratios to
its operations as they are.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from dovetail.runtime.presets import Mode
from dovetail.tuning.decisions import BackendChoice, RegionChoice, encode
from dovetail.tuning.environment import canonical_json
from dovetail.tuning.measurement import Subject


@dataclass(frozen=True)
class BlockDivision:
    """Regions of a block, each with the backend that runs it; what is in none runs as it is."""

    regions: tuple[tuple[RegionChoice, BackendChoice], ...] = ()

    @property
    def key(self) -> str:
        return digest_of([[encode(region), encode(backend)] for region, backend in self.regions])


@dataclass(frozen=True)
class Trial:
    """One measurement, in one mode."""

    mode: Mode

    @property
    def subject(self) -> Subject:
        raise NotImplementedError

    @property
    def blocks(self) -> tuple[str, ...]:
        """The keys of the blocks that it needs."""
        return ()

    @property
    def needs_model(self) -> bool:
        return False

    @property
    def compilations(self) -> int:
        """How many bodies are compiled for it at most."""
        return 0


@dataclass(frozen=True)
class OperationsTrial(Trial):
    """Every operation of a block alone, as it is, and the block as it is."""

    block: str
    operands: str

    @property
    def subject(self) -> Subject:
        return Subject("operations", self.block, self.operands, "eager", self.mode)

    @property
    def blocks(self) -> tuple[str, ...]:
        return (self.block,)


@dataclass(frozen=True)
class RegionTrial(Trial):
    """One region of a block by one backend, beside its operations as they are.

    `key` is that of its body, by which it is stored: an equal body of another block is not measured again.
    """

    block: str
    region: RegionChoice
    key: str
    operands: str
    backend: BackendChoice
    identity: str

    @property
    def subject(self) -> Subject:
        return Subject("body", self.key, self.operands, self.identity, self.mode)

    @property
    def blocks(self) -> tuple[str, ...]:
        return (self.block,)

    @property
    def compilations(self) -> int:
        return 1


@dataclass(frozen=True)
class BoundaryTrial(Trial):
    """A value that passes from one backend to another: two regions in a row, beside each of them alone.

    None stands for operations as they are.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    first: BackendChoice | None
    second: BackendChoice | None
    identity: str

    @property
    def subject(self) -> Subject:
        operands = f"{self.dtype}{list(self.shape)} on {self.device}"
        return Subject("boundary", digest_of(operands), operands, self.identity, self.mode)

    @property
    def compilations(self) -> int:
        return sum(backend is not None for backend in (self.first, self.second))


@dataclass(frozen=True)
class DivisionsTrial(Trial):
    """Some divisions of a block, interleaved, beside the block as it is."""

    block: str
    operands: str
    divisions: tuple[BlockDivision, ...]
    identity: str

    @property
    def subject(self) -> Subject:
        key = digest_of([self.block, *(division.key for division in self.divisions)])
        return Subject("divisions", key, self.operands, self.identity, self.mode)

    @property
    def blocks(self) -> tuple[str, ...]:
        return (self.block,)

    @property
    def compilations(self) -> int:
        return sum(len(division.regions) for division in self.divisions)


@dataclass(frozen=True)
class ProgramSpec:
    """A way to run the whole model: `plan` as JSON, or what runs without dovetail: "eager" or "torch.compile"."""

    name: str
    key: str
    plan: str = field(default="", repr=False)


@dataclass(frozen=True)
class ProgramTrial(Trial):
    """One whole program beside the model as it is: whether it computes the same, its time and its peak memory."""

    model: str
    operands: str
    program: ProgramSpec
    identity: str

    @property
    def subject(self) -> Subject:
        key = digest_of([self.model, self.program.key])
        return Subject("program", key, self.operands, f"{self.program.name} | {self.identity}", self.mode)

    @property
    def needs_model(self) -> bool:
        return True

    @property
    def compilations(self) -> int:
        return self.program.name != "eager"


@dataclass(frozen=True)
class ComparisonTrial(Trial):
    """Whole programs interleaved until they separate, the first one sampled twice in each round (A/A).

    `stage` distinguishes the comparison in a search from its confirmation in a fresh process.
    """

    model: str
    operands: str
    programs: tuple[ProgramSpec, ...]
    identity: str
    stage: str = "final"
    seed: int = 0
    seconds: float = 60.0

    @property
    def subject(self) -> Subject:
        key = digest_of([self.model, self.stage, self.seed, *(program.key for program in self.programs)])
        return Subject("comparison", key, self.operands, self.identity, self.mode)

    @property
    def needs_model(self) -> bool:
        return True

    @property
    def compilations(self) -> int:
        return len(self.programs)


def digest_of(value: object) -> str:
    """Return a hash of a JSON value as 32 hexadecimal digits."""
    return hashlib.blake2b(canonical_json(value).encode(), digest_size=16).hexdigest()
