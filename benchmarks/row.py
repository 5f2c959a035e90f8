"""A row of the benchmark table: what is measured, against what, and the bound it must keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.measure import Measurement, Memory, Spread, spread
from benchmarks.models import Size

__all__ = ["Result", "Row"]


@dataclass(frozen=True)
class Row:
    """One row. `measure` takes the size of the models and the number of pairs."""

    name: str
    what: str
    against: str
    measure: Callable[[Size, int], Measurement | Memory]
    """Raises: NotMeasured, where it cannot be done here."""
    bound: float | None = None
    """The largest median allowed; a row without one is there for context."""
    unit: Literal["ratio", "seconds", "added"] = "ratio"
    """What is measured: the ratio of both sides (or the memory that ours takes more), the time of ours, or
    the computing time that ours adds."""
    pairs: int = 0
    """Pairs of a full run; by default 31 to tell a median from its bound, and 11 for context."""

    def __post_init__(self) -> None:
        if not self.pairs:
            object.__setattr__(self, "pairs", 11 if self.bound is None else 31)


@dataclass(frozen=True)
class Result:
    """A row that was measured, or why it was not."""

    row: Row
    measurement: Measurement | Memory | None
    reason: str = ""
    """Why there is no measurement."""

    @property
    def spread(self) -> Spread:
        """The row's own numbers, in its unit."""
        measured = self.measurement
        if isinstance(measured, Memory):
            return spread(measured.ratios)
        assert measured is not None, f"{self.row.name} was not measured: {self.reason}"
        values = {"ratio": measured.ratios, "seconds": measured.seconds, "added": measured.added}
        return spread(values[self.row.unit])

    @property
    def held(self) -> bool | None:
        """Whether the median keeps the bound, `None` where there is none or nothing was measured."""
        return (
            None
            if self.row.bound is None or self.measurement is None
            else self.spread.median <= self.row.bound
        )

    @property
    def sure(self) -> bool:
        """Whether the bound lies outside the median's 95 % interval, which takes six pairs at least."""
        bound = self.row.bound
        if bound is None or self.measurement is None:
            return True
        spread = self.spread
        return len(self.measurement.ours) >= 6 and not spread.low <= bound <= spread.high
