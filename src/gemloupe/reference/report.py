"""What a verification found: a row for each value on each block by each look, and a verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ..support import spans
from .compare import FLOOR, MARGIN, Difference
from .heatmap import page
from .looks import LOOKS, MEANINGS, Look
from .names import place

__all__ = ["Absent", "Report", "Row"]

_WIDTH: Final = 110


@dataclass(frozen=True)
class Row:
    """One value on one block, by one look: the forward on which it is farthest off."""

    name: str
    """The standard path, `layers[3].mlp.mlp_output`."""
    look: Look
    difference: Difference

    @property
    def block(self) -> int | None:
        """The block, `None` for a value of the whole model."""
        return place(self.name)[0]

    @property
    def value(self) -> str:
        """The value's name inside its block, `mlp.mlp_output`."""
        return place(self.name)[1]

    @property
    def absolute(self) -> float:
        """The largest difference of two numbers."""
        return self.difference.absolute

    @property
    def relative(self) -> float:
        """The largest difference in units of the scale."""
        return self.difference.relative

    @property
    def scale(self) -> float:
        """The largest magnitude in the reference's value."""
        return self.difference.scale

    @property
    def tolerance(self) -> float:
        """The largest relative difference that the model's precision explains."""
        return self.difference.tolerance

    @property
    def held(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference.held

    def __str__(self) -> str:
        return (
            f"{self.name}, {MEANINGS[self.look]}: off by {self.relative:.2g} of its scale "
            f"{self.scale:.3g}, allowed {self.tolerance:.2g}"
        )


@dataclass(frozen=True)
class Absent:
    """A value that was not compared: where, and why."""

    name: str
    """The path, with `layers[i]` for a value of a block."""
    blocks: tuple[int, ...] | None
    """The blocks that lack it, `None` for a value of the whole model."""
    reason: str


@dataclass(frozen=True)
class Report:
    """The answer of `verify`: whether every value of a model is what its definition says.

    Its rows are in forward order; `held` is the verdict, `first` the first row that does not hold.
    `str` and a rich console show a table, `to_json` is the same for programs, `to_html` a page.
    """

    model: str
    num_layers: int
    precision: str
    """The precision that the weights are held in."""
    rounding: float
    """The most by which a number changes in it, relative to the number."""
    tokens: tuple[tuple[int, int], ...]
    """The rows and the length of each forward that was run."""
    rows: tuple[Row, ...]
    absent: tuple[Absent, ...]
    seconds: float

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def held(self) -> bool:
        """Whether every row holds."""
        return bool(self.rows) and not self.faults

    @cached_property
    def faults(self) -> tuple[Row, ...]:
        """The rows that do not hold, in forward order."""
        return tuple(row for row in self.rows if not row.held)

    @property
    def first(self) -> Row | None:
        """The first row that does not hold: where to look."""
        return next(iter(self.faults), None)

    def row(self, name: str, look: Look = "step") -> Row:
        """The row of a value, by its path.

        Raises: KeyError, where it was not compared.
        """
        for row in self.rows:
            if (row.name, row.look) == (name, look):
                return row
        raise KeyError(f"{name} was not compared by {look}.")

    @property
    def verdict(self) -> str:
        """The verdict in a sentence."""
        count, first = len(self.rows), self.first
        if first is None:
            return f"Every value is what its definition says: {count} of {count} rows hold."
        return f"{len(self.faults)} of {count} rows do not hold. The forward meets this one first: {first}."

    @property
    def derivation(self) -> str:
        """Where the tolerances come from, in this report's numbers."""
        floors = ", ".join(f"{FLOOR[look]:g} by {look}" for look in LOOKS)
        loose = sum(row.tolerance >= 1 for row in self.rows)
        return (
            f"A difference is the largest over the real tokens, in a tower over all patches or frames, in "
            f"units of the value's scale, its largest magnitude. Allowed is what float32 costs ({floors}: "
            f"transformers computes norms, router and rotary tables in it) or {MARGIN:g} times what one "
            f"rounding to {self.precision} of every value does, whichever is more. One rounding is at most "
            f"{self.rounding:.2g} of a number; what it does is measured, by running the reference again with "
            f"every value off by that, up or down at random."
            + (f" In {loose} rows that is more than the value itself: they say nothing." if loose else "")
        )

    @property
    def absences(self) -> tuple[str, ...]:
        """What was not compared, a sentence for each reason."""
        alike: dict[tuple[tuple[int, ...] | None, str], list[str]] = {}
        for absent in self.absent:
            alike.setdefault((absent.blocks, absent.reason), []).append(absent.name)
        return tuple(
            f"{', '.join(names)}{_on(blocks)}: {reason}" for (blocks, reason), names in alike.items()
        )

    # -- as text ---------------------------------------------------------------------------------------------

    def table(self) -> Table:
        """A row for each value, over all its blocks: the worst difference by each look, and the allowed."""
        table = Table("value", "blocks", *LOOKS, "held", box=None, header_style="dim", pad_edge=False)
        by_value: dict[str, list[Row]] = {}
        for row in self.rows:
            by_value.setdefault(row.value, []).append(row)
        for value, rows in by_value.items():
            blocks = {row.block for row in rows if row.block is not None}
            faults = [row for row in rows if not row.held]
            where = sorted({row.block for row in faults if row.block is not None})
            held = Text("yes", style="green")
            if faults:
                held = Text(f"NO{f', block {where[0]}' if where else ''}", style="bold red")
                held.append(" on" if len(where) > 1 else "")
            cells = [_worst(row for row in rows if row.look == look) for look in LOOKS]
            table.add_row(Text(value), str(len(blocks) or ""), *cells, held)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"{self.model}: {self.num_layers} blocks, {self.precision}", style="bold")
        forwards = ", ".join(f"{rows} x {length}" for rows, length in self.tokens)
        yield Text(f"Forwards of {forwards} tokens, {self.seconds:.1f} s. Each value is computed")
        for look, meaning in MEANINGS.items():
            yield Text(f"  {look:6} {meaning}")
        yield Text(
            "and compared. A cell is the difference and what is allowed, in units of the value's scale.\n"
        )
        yield self.table()
        if self.absent:
            yield Text("\nNot compared")
            for line in self.absences:
                yield Text(f"  {line}", style="dim")
        yield Text(f"\n{self.derivation}", style="dim")
        yield Text(f"\n{self.verdict}", style="bold green" if self.held else "bold red")

    def __str__(self) -> str:
        console = Console(width=_WIDTH, color_system=None, highlight=False, markup=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()

    __repr__ = __str__

    # -- for programs ----------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The report as a JSON object. What is no number or not finite is text: "nan", "inf"."""
        rows = [
            {
                "name": row.name,
                "block": row.block,
                "value": row.value,
                "look": row.look,
                **{of: _number(getattr(row, of)) for of in ("absolute", "relative", "scale", "tolerance")},
                "held": row.held,
            }
            for row in self.rows
        ]
        first = self.first
        return json.dumps(
            {
                "model": self.model,
                "held": self.held,
                "verdict": self.verdict,
                "first": None if first is None else {"name": first.name, "look": first.look},
                "num_layers": self.num_layers,
                "precision": self.precision,
                "rounding": self.rounding,
                "derivation": self.derivation,
                "tokens": self.tokens,
                "seconds": round(self.seconds, 3),
                "rows": rows,
                "absent": [asdict(absent) for absent in self.absent],
            },
            indent=2,
            allow_nan=False,
        )

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as a page that stands by itself: a heatmap of value by block for each look.

        path: where to write it, if anywhere. It loads nothing.
        """
        text = page(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def _on(blocks: tuple[int, ...] | None) -> str:
    if blocks is None:
        return ""
    return f" on block{'s' if len(blocks) > 1 else ''} {spans(blocks)}"


def _worst(rows: Iterable[Row]) -> str:
    row = max(rows, key=lambda row: row.difference.excess, default=None)
    return "" if row is None else f"{row.relative:.1e} of {row.tolerance:.1e}"


def _number(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
