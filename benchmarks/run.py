"""Runs the benchmarks, prints their table, and writes docs/benchmarks.md.

    python benchmarks/run.py                      everything, about half an hour
    python benchmarks/run.py --quick              fewer pairs
    python benchmarks/run.py --only layer_output  rows whose name contains this; writes no page
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
# Before torch starts its threads. One that waits for work by spinning is charged for it, and on a machine
# that does other work it keeps that work, and its own sibling, from running.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from benchmarks import forward, loading, report
from benchmarks.models import FULL
from benchmarks.row import Result, Row

SUITES = (forward, loading)
QUICK = 5
"""Pairs a row gets under `--quick`."""


def chosen(only: list[str] | None) -> list[Row]:
    """The rows to run, in order.

    Raises: typer.BadParameter, for a name that is part of no row's.
    """
    rows = [row for suite in SUITES for row in suite.ROWS]
    for name in only or ():
        if not any(name in row.name for row in rows):
            raise typer.BadParameter(f"no row is called {name}; there are {', '.join(row.name for row in rows)}")
    return [row for row in rows if not only or any(name in row.name for name in only)]


def main(
    quick: Annotated[bool, typer.Option(help=f"{QUICK} pairs a row: whether it runs, not what it is.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Rows whose name contains this; repeatable.")] = None,
    pairs: Annotated[int | None, typer.Option(help="Pairs a row, instead of its own number.")] = None,
    threads: Annotated[int, typer.Option(help="Threads torch computes with.")] = 2,
    output: Annotated[Path | None, typer.Option(help="Where to write the page.")] = None,
) -> None:
    """Measure Gemloupe against the bare model. Exit status 1 where a bound is clearly missed."""
    torch.set_num_threads(threads)
    console = Console()
    rows, results = chosen(only), []
    load = [report.load()]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(rows))
        for row in rows:
            progress.update(task, description=row.name)
            results.append(Result(row, row.measure(FULL, pairs or (QUICK if quick else row.pairs))))
            progress.console.print(report.line(results[-1]))
            progress.advance(task)
    load.append(report.load())
    console.print(report.table(results))
    place = output or (None if only else ROOT / "docs" / "benchmarks.md")
    if place is not None:
        place.write_text(report.page(results, threads=threads, quick=quick, load=load))
    raise typer.Exit(any(result.held is False and result.sure for result in results))


if __name__ == "__main__":
    typer.run(main)
