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
from benchmarks.measure import Measurement, Memory
from benchmarks.models import FULL, VOCABULARY
from benchmarks.row import Result

__all__ = ["line", "page", "table"]

NUMBERS: Final = ("bound", "median", "middle half", "median's 95 %", "CPU", "ours", "theirs", "held")

PAGE: Final = """\
# Benchmarks

What the library costs beside the bare model. `make bench` writes this page.

{date}, on {machine}; {versions}.
The models have random weights, {size} and the proportions of the published
checkpoints, in float32 under sdpa unless the row says otherwise, without gradients.
{warnings}
{table}
{missing}
Both sides of a row run in turn, A B, B A, A B, on two modules with the same weights, one of which nothing has
touched. Each pair gives a ratio of wall times, or where the bound is in seconds, the time of our side. On
every pair of forwards the tensors that both sides keep are compared, bit for bit; where the sides run
different attention, up to its rounding. Where they keep different things, ours are checked once beforehand.

- **median** is the middle of the pairs, **middle half** holds half of them, and the true median lies in
  **median's 95 %** with that confidence. A `?` after **held** says that the bound lies in there too, so the
  pairs do not tell.
- **CPU** is the same ratio in computing time of all threads together. Other work on the machine moves it
  less, and what one thread adds while the others wait weighs less in it.
- **ours** and **theirs** are median wall times, for scale.
- The rows of *a second bare module* compare two untouched modules: what they differ by is the measurement's
  own.
- **The pattern of one block** is read in a trace under sdpa, and the whole forward runs. transformers has no
  pattern under sdpa, so it is checked against its eager attention. The patterns of all blocks are compared
  with the forward that transformers needs for them: eager, every block's pattern kept, as ours are.
- **Peak memory** is the most that torch's CPU allocator held at once, above what it held before, from the
  profiler's record of every request to it. The row gives our peak less the other side's, in patterns of one
  block (batch x heads x tokens x tokens x 4 bytes) or in what the row says; *ours* and *theirs* are the
  peaks. The plain forward's peak is in the last block's MLP, not in an attention: what was kept before it
  adds to it in full.
- **`collect`** stops the forward after the last value asked for, before the final norm and the head; the
  hooks and the peers run both. With a vocabulary of {vocabulary} tokens that is little.
- **TransformerLens** and **nnterp** run each in a process and an environment of its own, on the same weights
  and prompt and with as many threads; TransformerLens under the eager attention that it sets, and without a
  key-value cache but in `generate`. They are asked for one run at a time, in turn with ours, and time it
  themselves. Their tensors are checked against ours once beforehand.
- **The early stop** after block k of L may take (k + 1) / L of the whole forward, and a tenth more for all
  that is no block.
- **`verify`** is given one text, of 512 tokens in the dense row, on which it runs the float64 reference
  eleven times.
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
    bound = "" if result.row.bound is None else number(result.row.bound, result)
    if result.measurement is None:
        return [bound, "not measured", *[""] * (len(NUMBERS) - 2)]
    spread = result.spread
    return [
        bound,
        number(spread.median, result),
        f"{number(spread.quarter, result)} to {number(spread.three_quarters, result)}",
        f"{number(spread.low, result)} to {number(spread.high, result)}",
        *taken(result.measurement),
        held(result),
    ]


def taken(measured: Measurement | Memory) -> list[str]:
    """What both sides took: the ratio in computing time, and each side's median."""
    if isinstance(measured, Memory):
        return ["", *(f"{median(side) / 2**20:.1f} MiB" for side in (measured.ours, measured.theirs))]
    sides = (measured.ours, measured.theirs)
    return [f"{measured.cpu_ratio:.3f}", *(seconds(median(one.wall for one in side)) for side in sides)]


def line(result: Result) -> str:
    """A row's result, short."""
    if result.measurement is None:
        return f"{result.row.name}: not measured: {result.reason}"
    _, middle, _, interval, cpu, _, _, verdict = numbers(result)
    return f"{result.row.name}: {middle} ({interval}){f', CPU {cpu}' if cpu else ''} {verdict}"


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
    reasons = dict.fromkeys(result.reason for result in results if result.measurement is None)
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
        vocabulary=VOCABULARY,
        missing="".join(f"\n**Not measured:** {reason}.\n" for reason in reasons),
        table="\n".join("| " + " | ".join(row) + " |" for row in rows),
    )
