"""The results as a table for the terminal and as the page `docs/benchmarks.md`."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from statistics import median
from typing import Final

from rich.table import Table

import gemloupe
from benchmarks.models import FULL
from benchmarks.row import Result

__all__ = ["line", "page", "table"]

NUMBERS: Final = ("bound", "median", "middle half", "median's 95 %", "CPU", "ours", "theirs", "held")

PAGE: Final = """\
# Benchmarks

What the library costs beside the bare model. `make bench` writes this page.

{date}, on {machine}; {versions}.
The models have random weights, {size} and the proportions of the published
checkpoints, in float32 under sdpa, without gradients.
{warnings}
{table}

Both sides of a row run in turn, A B, B A, A B, on two modules with the same weights, one of which nothing has
touched. Each pair gives a ratio of wall times, or where the bound is in seconds, the time of our side. On
every pair of forwards the tensors that both sides keep are compared, bit for bit.

- **median** is the middle of the pairs, **middle half** holds half of them, and the true median lies in
  **median's 95 %** with that confidence. A `?` after **held** says that the bound lies in there too, so the
  pairs do not tell.
- **CPU** is the same ratio in computing time of all threads together. Other work on the machine moves it
  less, and what one thread adds while the others wait weighs less in it.
- **ours** and **theirs** are median wall times, for scale.
- The rows of *a second bare module* compare two untouched modules: what they differ by is the measurement's
  own.
- The *small* rows are taken on one thread, on a model of 12 blocks that compute next to nothing. Those in
  milliseconds are the computing time that is added to one forward: it hardly depends on the width, so a
  larger model pays the same.
"""


def versions() -> str:
    """The releases that were measured."""
    others = [f"{name} {version(name)}" for name in ("torch", "transformers", "nnsight")]
    return ", ".join([f"gemloupe {gemloupe.__version__}", f"Python {platform.python_version()}", *others])


def number(value: float, result: Result) -> str:
    return f"{value:.3f}" if result.row.unit == "ratio" else seconds(value)


def seconds(value: float) -> str:
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{value * 1000:.0f} ms" if abs(value) >= 0.02 else f"{value * 1000:.2f} ms"


def held(result: Result) -> str:
    if result.held is None:
        return ""
    return ("yes" if result.held else "no") + ("" if result.sure else "?")


def numbers(result: Result) -> list[str]:
    """The numbers of a row, in the order of `NUMBERS`."""
    row, spread, measured = result.row, result.spread, result.measurement
    ours, theirs = (median(sample.wall for sample in side) for side in (measured.ours, measured.theirs))
    return [
        "" if row.bound is None else number(row.bound, result),
        number(spread.median, result),
        f"{number(spread.quarter, result)} to {number(spread.three_quarters, result)}",
        f"{number(spread.low, result)} to {number(spread.high, result)}",
        f"{measured.cpu_ratio:.3f}",
        seconds(ours),
        seconds(theirs),
        held(result),
    ]


def line(result: Result) -> str:
    """A row's result, short."""
    _, middle, _, interval, cpu, _, _, verdict = numbers(result)
    return f"{result.row.name}: {middle} ({interval}), CPU {cpu} {verdict}"


def table(results: Sequence[Result]) -> Table:
    """The results for a terminal."""
    shown = [NUMBERS.index(name) for name in NUMBERS if name != "middle half"]
    grid = Table("row", *(NUMBERS[index] for index in shown))
    colors = {None: None, True: "green", False: "red"}
    for result in results:
        values = numbers(result)
        style = colors[result.held if result.sure else None]
        grid.add_row(result.row.name, *(values[index] for index in shown), style=style)
    return grid


def page(results: Sequence[Result], *, threads: int, quick: bool, load: Sequence[float]) -> str:
    """The results as `docs/benchmarks.md`."""
    columns = ("what", "against", *NUMBERS)
    rows = [columns, ["---"] * len(columns)]
    rows += [(result.row.what, result.row.against, *numbers(result)) for result in results]
    warnings = []
    if quick:
        warnings.append("**A quick run:** its few pairs say that the rows run, not what they are.")
    if max(load) > 1.5 * (os.cpu_count() or 1):
        average = f"load average {load[0]:.1f} before, {load[1]:.1f} after"
        warnings.append(f"**Other work ran on the machine meanwhile:** {average}.")
    return PAGE.format(
        date=date.today().isoformat(),
        machine=f"{platform.machine()}, {os.cpu_count()} cores, {threads} threads",
        versions=versions(),
        size=f"{FULL.layers} layers, hidden {FULL.hidden}, {FULL.batch} x {FULL.seq} tokens",
        warnings="".join(f"\n{warning}\n" for warning in warnings),
        table="\n".join("| " + " | ".join(row) + " |" for row in rows),
    )
