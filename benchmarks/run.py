"""Runs the benchmarks, prints their table, and writes docs/benchmarks.md.

`python benchmarks/run.py` runs everything, half an hour on two idle cores. `--quick` takes few pairs
a row; `--only layer_output` takes the rows whose name contains that, and writes no page.
TransformerLens and nnterp need an environment each, which the first run makes (minutes, more than a gigabyte
each); `--transformerlens PATH` and `--nnterp PATH` name one that has it.
"""

# ruff: noqa: E402 (torch reads the environment when it is imported)

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    # Before torch starts its threads: one that spins while it waits is charged for it, and on a machine
    # that does other work it takes the core that its sibling needs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import typer
from rich.console import Console

from benchmarks import attention, capture, compared, forward, harvesting, loading, report, verifying
from benchmarks.measure import NotMeasured
from benchmarks.models import FULL
from benchmarks.peer import NNTERP, TRANSFORMERLENS
from benchmarks.row import Result, Row

SUITES = (forward, attention, capture, compared, harvesting, verifying, loading)
QUICK = 3


def chosen(only: list[str] | None) -> list[Row]:
    """The rows whose names contain one of `only`, or all of them.

    Raises: typer.BadParameter, for a name that no row's contains.
    """
    rows = [row for suite in SUITES for row in suite.ROWS]
    for name in only or ():
        if not any(name in row.name for row in rows):
            known = ", ".join(row.name for row in rows)
            raise typer.BadParameter(f"no row's name contains {name!r}; there are {known}")
    return [row for row in rows if not only or any(name in row.name for name in only)]


def measured(row: Row, pairs: int) -> Result:
    """The row's result at full size, or why it cannot be measured here: also where the two sides do not do
    the same work, so that one row does not cost all others theirs."""
    try:
        return Result(row, row.measure(FULL, pairs))
    except (NotMeasured, AssertionError) as error:
        return Result(row, None, str(error))


def main(
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK} pairs a row.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="Rows whose name contains this; repeatable.")] = None,
    pairs: Annotated[int | None, typer.Option(help="Pairs a row, instead of each row's own number.")] = None,
    threads: Annotated[int, typer.Option(help="Threads that torch computes with.")] = 2,
    page: Annotated[Path | None, typer.Option(help="Where to write the page.")] = None,
    transformerlens: Annotated[
        Path | None, typer.Option(help="An environment that has TransformerLens.")
    ] = None,
    nnterp: Annotated[Path | None, typer.Option(help="An environment that has nnterp.")] = None,
) -> None:
    """Measure Gemloupe against the bare model. Exit status 1 where a bound is clearly missed."""
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    for kind, place in ((TRANSFORMERLENS, transformerlens), (NNTERP, nnterp)):
        if place is not None:
            os.environ[kind.variable] = str(place.resolve())
    # Where the output is no terminal, rich would fold the table to 80 columns.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    rows, results = chosen(only), []
    load = [os.getloadavg()[0]]
    for number, row in enumerate(rows, 1):
        results.append(measured(row, pairs or (QUICK if quick else row.pairs)))
        console.print(f"{number}/{len(rows)} {report.line(results[-1])}")
    load.append(os.getloadavg()[0])
    console.print(report.table(results))
    written = page or (None if only else ROOT / "docs" / "benchmarks.md")
    if written is not None:
        written.write_text(report.page(results, threads=threads, quick=quick, load=load))
    raise typer.Exit(any(result.held is False and result.sure for result in results))


if __name__ == "__main__":
    typer.run(main)
