"""The bar of a harvest: tokens done, tokens per second, and when it will be over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from time import monotonic
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

__all__ = ["Ends", "Lines", "Rate", "bar"]

_EVERY: Final = 60.0
"""Seconds between two lines of a log."""


class Rate(ProgressColumn):
    """Tokens per second."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.0f} tokens/s")


class Ends(ProgressColumn):
    """The hour at which it will be over, with the day where that is another."""

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text("done")
        return Text("" if task.time_remaining is None else ends(task.time_remaining))


def ends(seconds: float) -> str:
    """When it will be over."""
    now = datetime.now()
    end = now + timedelta(seconds=seconds)
    return f"ends {end:%H:%M}" if end.date() == now.date() else f"ends {end:%a %d %b %H:%M}"


@contextmanager
def bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of tokens on stderr, or where nobody looks on, a line a minute; gives the function that moves
    it."""
    console = Console(stderr=True)
    if not shown:
        yield lambda _: None
        return
    if not (console.is_terminal or console.is_jupyter):
        yield Lines(total, console).advance
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), Ends())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("tokens", total=total)
        yield lambda tokens: progress.advance(task, tokens)


class Lines:
    """What a bar says, as lines for a log: `harvest: 1,000 of 9,000 tokens, 120 tokens/s, ends 14:02`."""

    def __init__(self, total: int, console: Console) -> None:
        self.total = total
        self.console = console
        self.done = 0
        self.begun = self.said = monotonic()

    def advance(self, tokens: int) -> None:
        """Count tokens, and say so if a minute has gone by."""
        self.done += tokens
        now = monotonic()
        if now - self.said < _EVERY:
            return
        self.said = now
        speed = self.done / (now - self.begun)
        left = (self.total - self.done) / speed
        said = f"harvest: {self.done:,} of {self.total:,} tokens, {speed:,.0f} tokens/s, {ends(left)}"
        self.console.print(said, highlight=False, soft_wrap=True)
