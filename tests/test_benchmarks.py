"""The benchmarks run, at a size where nothing is to be measured: no time is asserted here."""

from __future__ import annotations

import gc
from itertools import product
from typing import Any

import pytest
import torch
import typer

from benchmarks import forward, loading, report, run
from benchmarks.measure import (
    Measurement,
    Sample,
    Side,
    alternate,
    command,
    one_thread,
    python,
    spread,
    timed_in_process,
)
from benchmarks.models import FULL, TINY, config_31b, overrides, twins
from benchmarks.row import Result, Row

PROCESSES = ("tree/first", "import/")
NO_SIZE: Any = None


def row(**fields: Any) -> Row:
    return Row("suite/name", "what", "against", lambda *_: measurement([1.0]), **fields)


def measurement(walls: list[float]) -> Measurement:
    """Pairs whose other side took a second."""
    one = [Sample(1.0, 1.0)] * len(walls)
    return Measurement(tuple(Sample(wall, 2 * wall) for wall in walls), tuple(one))


# ---- the rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", forward.ROWS, ids=lambda row: row.name)
def test_a_row_of_one_forward_runs_and_both_sides_agree(one: Row) -> None:
    measured = one.measure(TINY, 1)
    assert len(measured.ours) == len(measured.theirs) == 1
    assert all(sample.wall > 0 for sample in (*measured.ours, *measured.theirs))
    assert report.line(Result(one, measured))


@pytest.mark.parametrize("one", loading.ROWS, ids=lambda row: row.name)
def test_a_row_of_loading_runs(one: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    if one.name.startswith(PROCESSES):
        # The processes are started, but import next to nothing.
        monkeypatch.setattr(loading, "python", lambda code, *arguments: python(stand_in(code), *arguments))
    measured = one.measure(TINY, 1)
    assert measured.ours[0].wall > 0


def stand_in(code: str) -> str:
    """A fast program with the answer that `code` would give, if `code` is a program at all."""
    compile(code, "benchmark", "exec")
    return "print('[1.0, 2.0]')"


def test_the_statements_that_are_timed_as_imports_are_imports() -> None:
    names = [each.what for each in loading.ROWS if each.name.startswith("import/")]
    assert names == ["`import gemloupe`", "`from gemloupe import StandardizedTransformer`"]


def test_every_bound_that_was_promised_has_a_row() -> None:
    bounds = {each.name: (each.bound, each.unit) for suite in run.SUITES for each in suite.ROWS if each.bound}
    assert bounds == {
        **{f"{shape}/outside": (1.02, "ratio") for shape in ("31b", "e2b", "26b-a4b")},
        **{f"{shape}/layer_output": (1.05, "ratio") for shape in ("31b", "e2b", "26b-a4b")},
        "tree/directory": (1.0, "seconds"),
        "tree/module": (1.0, "seconds"),
        "import/package": (1.1, "ratio"),
        "import/class": (1.1, "ratio"),
    }


def test_the_measured_size_is_the_promised_one() -> None:
    assert (FULL.hidden, FULL.layers, FULL.batch, FULL.seq) == (512, 12, 4, 256)
    for shape in ("31b", "e2b", "26b-a4b"):
        fields = overrides(shape, FULL)
        assert (fields["hidden_size"], fields["num_hidden_layers"]) == (512, 12)


def test_twins_are_modules_of_their_own_with_the_same_weights() -> None:
    pair = twins("e2b", TINY)
    modules = {each: list(each.modules()) for each in (pair.bare, pair.second, pair.wrapped)}
    assert len({id(module) for group in modules.values() for module in group}) == 3 * len(modules[pair.bare])
    weights = [[id(tensor) for tensor in each.state_dict(keep_vars=True).values()] for each in modules]
    assert weights[0] == weights[1] == weights[2]
    touched = ["forward" in vars(each) for each in modules]
    assert touched == [False, False, True]


def test_the_large_config_is_the_31b() -> None:
    loading_module = loading.native()
    assert sum(weight.numel() for weight in loading_module.parameters()) == 30_697_345_280
    assert config_31b().num_hidden_layers == 60


def test_names_are_unique_and_choose_rows() -> None:
    names = [each.name for each in run.chosen(None)]
    assert len(names) == len(set(names))
    chosen = [each.name for each in run.chosen(["layer_output", "import/"])]
    assert chosen == [name for name in names if "layer_output" in name or "import/" in name]
    with pytest.raises(typer.BadParameter, match=r"contains 'outsid_'; there are 31b/control"):
        run.chosen(["outside", "outsid_"])


# ---- the measurement ---------------------------------------------------------------------------------------


def test_sides_run_in_turn_each_first_as_often_and_warmup_does_not_count() -> None:
    order: list[str] = []
    sides = [Side(lambda name=name: order.append(name)) for name in "AB"]
    measured = alternate(sides[0], sides[1], 3, warmup=1)
    assert "".join(order) == "ABBAABBA"
    assert len(measured.ours) == 3


def test_setup_is_run_afresh_and_a_clock_reads_the_result() -> None:
    made = iter(range(100))
    side = Side(lambda number: number, setup=lambda: next(made), clock=lambda number: Sample(number, 0.0))
    other = Side(lambda: None, clock=lambda _: Sample(1.0, 1.0))
    assert [sample.wall for sample in alternate(side, other, 3, warmup=2).ours] == [2, 3, 4]


@pytest.mark.parametrize("others", [[torch.zeros(2)], [torch.ones(2), torch.ones(2)]], ids=["value", "count"])
def test_sides_that_do_different_work_are_not_compared(others: list[torch.Tensor]) -> None:
    ours, theirs = Side(lambda: [torch.ones(2)]), Side(lambda: others)
    with pytest.raises(AssertionError, match=r"differs|one side gave"):
        alternate(ours, theirs, 1, same=lambda result: result)
    assert gc.get_freeze_count() == 0


def test_one_thread_is_undone() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_a_process_is_timed_and_finds_the_package() -> None:
    sample = command(python("import gemloupe; print(len(gemloupe.__version__))"))
    assert sample.wall > 0
    assert timed_in_process(python("print('noise'); print(sys.argv[1])", "[0.5, 0.25]")) == Sample(0.5, 0.25)


# ---- what the samples say ----------------------------------------------------------------------------------


def ways_below(count: int, outside: int) -> int:
    """Of all ways in which `count` values fall on either side of the median, those with too few below."""
    return sum(sum(sides) <= outside for sides in product((0, 1), repeat=count))


@pytest.mark.parametrize("count", [6, 9, 12, 15])
def test_the_interval_is_the_narrowest_with_its_confidence(count: int) -> None:
    found = spread([float(value) for value in range(count)])
    outside = int(found.low)
    assert found.high == count - 1 - outside
    assert ways_below(count, outside) / 2**count <= 0.025 < ways_below(count, outside + 1) / 2**count


def test_the_spread_of_few_values() -> None:
    assert spread([3.0]) == (3.0, 3.0, 3.0, 3.0, 3.0)
    assert spread([4.0, 1.0, 3.0, 2.0]) == (2.5, 1.75, 3.25, 1.0, 4.0)


@pytest.mark.parametrize(
    ("walls", "held", "sure"),
    [
        ([1.0] * 6, True, True),
        ([1.2] * 6, False, True),
        ([1.0] * 4 + [1.2] * 2, True, False),
        ([1.0] * 5, True, False),
    ],
    ids=["held", "missed", "in between", "too few"],
)
def test_a_bound_is_held_missed_or_not_told(walls: list[float], held: bool, sure: bool) -> None:
    result = Result(row(bound=1.1), measurement(walls))
    assert (result.held, result.sure) == (held, sure)
    assert report.line(result).endswith(("yes" if held else "no") + ("" if sure else "?"))


def test_units() -> None:
    samples = measurement([0.5, 0.7, 0.9])
    assert Result(row(), samples).spread.median == 0.7
    assert Result(row(unit="seconds"), samples).spread.median == 0.7
    assert Result(row(unit="added"), samples).spread.median == pytest.approx(0.4)  # of computing time
    assert Result(row(), samples).held is None


def test_the_page_has_every_row_and_says_what_it_is_worth() -> None:
    results = [Result(row(bound=1.1), measurement([1.0] * 6)), Result(row(unit="added"), measurement([1.5]))]
    page = report.page(results, threads=2, quick=True, load=[0.1, 1000.0])
    table = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(table) == 2 + len(results)
    assert len({line.count("|") for line in table}) == 1
    assert "| what | against | 1.100 | 1.000 |" in page
    assert "A quick run" in page
    assert "Other work ran" in page
    assert "Other work ran" not in report.page(results, threads=2, quick=False, load=[0.0, 0.0])
