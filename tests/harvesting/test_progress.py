"""The bar: tokens done, tokens per second, and the hour of its end."""

from __future__ import annotations

import itertools
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gemloupe import harvest
from gemloupe.harvesting import progress
from gemloupe.harvesting.progress import Ends, Rate
from tests.harvesting.data import LENGTHS, OUTPUT, model, rows_of_ids


class Task:
    """What rich knows of a bar."""

    def __init__(self, **facts: Any) -> None:
        self.finished, self.finished_speed, self.speed, self.time_remaining = False, None, None, None
        self.__dict__.update(facts)


def rendered(column: Any, **facts: Any) -> str:
    return column.render(Task(**facts)).plain


def test_tokens_per_second():
    assert rendered(Rate()) == ""
    assert rendered(Rate(), speed=12345.6) == "12,346 tokens/s"
    assert rendered(Rate(), speed=1.0, finished_speed=2.0) == "2 tokens/s"


def test_the_hour_of_the_end():
    assert rendered(Ends()) == ""
    assert rendered(Ends(), finished=True, time_remaining=0) == "done"
    for seconds in (30, 3 * 86_400):
        before = datetime.now() + timedelta(seconds=seconds)
        text = rendered(Ends(), time_remaining=seconds)
        after = datetime.now() + timedelta(seconds=seconds)
        far = before.date() != datetime.now().date()
        assert text in {f"ends {end:{'%a %d %b ' if far else ''}%H:%M}" for end in (before, after)}


@pytest.mark.parametrize("shown", [True, False])
def test_a_log_gets_a_line_a_minute(
    shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock = itertools.count(0, 25)  # seconds from one batch to the next
    monkeypatch.setattr(progress, "monotonic", lambda: float(next(clock)))
    harvest(model(), rows_of_ids(), OUTPUT, tmp_path / "s", tokens_per_batch=10, progress=shown)
    lines = capsys.readouterr().err.splitlines()
    if not shown:
        assert lines == []
        return
    batches = next(clock) // 25 - 1
    assert len(lines) == batches // 3 > 1
    total = sum(LENGTHS)
    for number, line in enumerate(lines, 1):
        found = re.fullmatch(rf"harvest: (\d+) of {total} tokens, (\d+) tokens/s, ends \d\d:\d\d", line)
        assert found, line
        assert int(found[2]) == round(int(found[1]) / (75 * number))


@pytest.mark.parametrize("shown", [True, False])
def test_a_terminal_sees_the_bar_and_a_file_does_not(
    shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    harvest(model(), rows_of_ids(), OUTPUT, tmp_path / "file")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    consoles: list[Console] = []

    def terminal(**_: Any) -> Console:
        consoles.append(Console(stderr=True, force_terminal=True, width=120))
        return consoles[-1]

    monkeypatch.setattr(progress, "Console", terminal)
    harvest(model(), rows_of_ids(), OUTPUT, tmp_path / "terminal", tokens_per_batch=10, progress=shown)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert (f"{sum(LENGTHS)}/{sum(LENGTHS)}" in text) == shown
    assert bool(re.search(r"tokens/s +done", text)) == shown
