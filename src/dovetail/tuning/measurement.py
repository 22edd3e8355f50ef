"""What is measured and what came of it, as values that every process, release and database reads alike."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from typing import TypeAlias, cast

from dovetail.errors import InvalidArgument
from dovetail.tuning.environment import canonical_json

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
MODES = ("inference", "training")
_MOST_BYTES = 2**63 - 1


@dataclass(frozen=True)
class Subject:
    """What is measured.

    `kind` is a short word such as "body", "boundary" or "program"; `key` the structural hash of the body or program;
    `operands` the shapes, strides, dtypes and aliasing of its operands; `backend` the backend with version and options;
    `mode` is "inference" or "training".
    """

    kind: str
    key: str
    operands: str
    backend: str
    mode: str

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not isinstance(value, str) or value != _storable(value):
                raise InvalidArgument(
                    f"Subject.{each.name} is text without NUL or surrogates, not {value!r}."
                )
        if not self.kind or not self.key:
            raise InvalidArgument("a subject has a kind and a key; one of them is empty.")
        if self.mode not in MODES:
            raise InvalidArgument(f"Subject.mode is 'inference' or 'training', not '{self.mode}'.")

    @property
    def digest(self) -> str:
        """The hash of all fields as 32 hexadecimal digits, equal in every process and release."""
        return hashlib.blake2b(canonical_json(astuple(self)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Measurement:
    """The result of a measurement: raw samples, or why there are none.

    `samples` are seconds in the order they were taken. `failure` is empty unless there are no samples. `numeric_error`
    is the largest error against the reference, which may be infinite or NaN. `details` are JSON values; sequences in
    them become lists. A measurement equals the one that a store returns for it.
    """

    samples: tuple[float, ...]
    failure: str = ""
    numeric_error: float | None = None
    peak_bytes: int | None = None
    compile_seconds: float = 0.0
    details: Mapping[str, JSON] = field(default_factory=dict[str, JSON], hash=False)

    def __post_init__(self) -> None:
        samples = tuple(_duration("samples", sample) for sample in self.samples)
        if bool(samples) == bool(self.failure):
            raise InvalidArgument("a measurement has samples or a failure: give one of them, and not both.")
        if self.numeric_error is not None and not _is_number(self.numeric_error):
            raise InvalidArgument(
                f"Measurement.numeric_error is a number or None, not {self.numeric_error!r}."
            )
        peak = self.peak_bytes
        if peak is not None and (type(peak) is not int or not 0 <= peak <= _MOST_BYTES):
            raise InvalidArgument(f"Measurement.peak_bytes is a number of bytes or None, not {peak!r}.")
        normalized = {
            "samples": samples,
            "failure": _storable(self.failure),
            "numeric_error": None if self.numeric_error is None else float(self.numeric_error),
            "compile_seconds": _duration("compile_seconds", self.compile_seconds),
            "details": _json_object(self.details),
        }
        for name, value in normalized.items():
            object.__setattr__(self, name, value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _duration(name: str, value: object) -> float:
    if not _is_number(value) or not 0.0 <= float(cast("float", value)) < math.inf:
        raise InvalidArgument(f"Measurement.{name} are seconds, finite and not negative, not {value!r}.")
    return float(cast("float", value))


def _storable(text: str) -> str:
    """Return text that every database can hold: NUL and lone surrogates, as compilers may print them, are escaped."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def _json_object(details: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return a copy as JSON gives it back; raise InvalidArgument for what it would change, such as other keys than text."""
    if not isinstance(details, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"Measurement.details is a dict, not a {type(details).__name__}.")
    try:
        _check_keys(details)
        return json.loads(canonical_json(dict(details)))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"Measurement.details are JSON values: {error}.") from None


def _check_keys(value: object) -> None:
    """Raise TypeError for a key that is not text: JSON would write another key, or the same one twice."""
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value)
        for key in items:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not text")
        children = list(items.values())
    else:
        children = list(cast("list[object]", value)) if isinstance(value, list | tuple) else []
    for child in children:
        _check_keys(child)
