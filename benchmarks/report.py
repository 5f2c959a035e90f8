"""The results as a table for the terminal and as the page `docs/benchmarks.md`."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from statistics import median
from typing import Final

import torch
from rich.table import Table

from benchmarks.models import FULL
from benchmarks.row import Result

__all__ = ["line", "load", "page", "table"]

COLUMNS: Final = ("", "against", "bound", "median", "middle half", "median's 95 %", "CPU", "ours", "theirs", "held")

PAGE: Final = """\
# Benchmarks

What the library costs beside the bare model. Written by `make bench`; do not edit.

{date}, {machine}.
{versions}.
{models}

{notes}

{table}

**How it is measured.** Both sides of a row run in turn, A B, B A, A B, ..., on two modules of equal weights of
which one was never touched; each pair gives a ratio, and the two sides' tensors are compared bit for bit on
every pair. *Median* is the middle of the pairs' ratios on the wall clock (in seconds where the bound is),
*middle half* holds half of them, and the true median lies in *median's 95 %* with that confidence. A `?` after
*held* says that this interval holds the bound: the pairs do not tell. *CPU* is the same ratio of computing time
of all threads, which other work on the machine moves less; *ours* and *theirs* are median times, for scale
alone. The `control` rows compare two untouched modules: what they are away from 1 is the measurement's own.
"""


def load() -> float:
    """How many processes wanted a core in the last minute."""
    return os.getloadavg()[0]


def machine(threads: int) -> str:
    """The machine in general words."""
    return f"{platform.machine()}, {os.cpu_count()} cores, float32, {threads} threads"


def versions() -> str:
    """The releases that were measured."""
    names = ("gemloupe", "torch", "transformers", "nnsight")
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in names)])


def _version(name: str) -> str:
    import gemloupe

    return gemloupe.__version__ if name == "gemloupe" else version(name)


def number(value: float, result: Result) -> str:
    return f"{value:.3f}" if result.row.unit == "ratio" else seconds(value)


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def held(result: Result) -> str:
    if result.held is None:
        return ""
    return ("yes" if result.held else "no") + ("" if result.sure else "?")


def cells(result: Result) -> list[str]:
    """A row of the table, in the order of `COLUMNS`."""
    row, spread, measured = result.row, result.spread, result.measurement
    ours, theirs = (median(sample.wall for sample in side) for side in (measured.ours, measured.theirs))
    return [
        row.what,
        row.against,
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
    spread = result.spread
    return (
        f"{result.row.name:24} {number(spread.median, result)}"
        f"  ({number(spread.low, result)} to {number(spread.high, result)}), CPU {result.measurement.cpu_ratio:.3f}"
        f"  {held(result)}"
    )


def table(results: Sequence[Result]) -> Table:
    """The results for a terminal."""
    grid = Table(*COLUMNS)
    for result in results:
        color = {None: None, True: "green", False: "red"}[result.held if result.sure else None]
        grid.add_row(*cells(result), style=color)
    return grid


def page(results: Sequence[Result], *, threads: int, quick: bool, load: Sequence[float]) -> str:
    """The results as `docs/benchmarks.md`."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, results)]
    busy = max(load) > 1.5 * threads
    notes = [
        "A quick run: five pairs a row say whether it runs, not what it is." if quick else "",
        f"Other work ran on the machine meanwhile (load average {load[0]:.1f} at the start, {load[1]:.1f} at the end)."
        if busy
        else "",
    ]
    return PAGE.format(
        date=date.today().isoformat(),
        machine=machine(threads),
        versions=versions(),
        models=f"Random weights, hidden {FULL.hidden}, {FULL.layers} layers, {FULL.batch} x {FULL.seq} tokens, sdpa.",
        notes="\n".join(note for note in notes if note),
        table="\n".join("| " + " | ".join(row) + " |" for row in rows),
    )
