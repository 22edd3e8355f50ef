"""How large a region may become."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dovetail.errors import InvalidArgument, checked_init


@checked_init()
@dataclass(frozen=True)
class Limits:
    """The most that a region may have; None is no limit.

    `nodes` counts the operations it computes, `operands` what it reads from outside, `outputs` what it returns,
    `bytes` what operands and outputs take together.
    """

    nodes: int | None = None
    operands: int | None = None
    outputs: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"limit {field.name}={value!r} is not a positive int.")

    @property
    def unlimited(self) -> bool:
        """Whether there is no limit at all."""
        return all(getattr(self, field.name) is None for field in fields(self))


UNLIMITED = Limits()
