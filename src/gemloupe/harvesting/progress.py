"""The bar of a harvest: tokens done, tokens per second, and when it will be over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

__all__ = ["Ends", "Rate", "bar"]


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
        if task.time_remaining is None:
            return Text("")
        now = datetime.now()
        end = now + timedelta(seconds=task.time_remaining)
        return Text(f"ends {end:%H:%M}" if end.date() == now.date() else f"ends {end:%a %d %b %H:%M}")


@contextmanager
def bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of tokens on stderr, where somebody looks on; gives the function that moves it."""
    console = Console(stderr=True)
    if not (shown and (console.is_terminal or console.is_jupyter)):
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), Ends())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("tokens", total=total)
        yield lambda tokens: progress.advance(task, tokens)
