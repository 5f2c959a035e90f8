"""The benchmarks run, at a size where nothing is to be measured: no time is asserted here."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from benchmarks import attention, capture, forward, harvesting, loading, memory, peer, report, run, verifying
from benchmarks.measure import (
    Measurement,
    Memory,
    NotMeasured,
    Sample,
    Side,
    alternate,
    command,
    insist,
    one_thread,
    python,
    spread,
    timed_in_process,
)
from benchmarks.models import FULL, TINY, config_31b, overrides, twins
from benchmarks.row import Result, Row

PROCESSES = ("tree/first", "import/")
PEER_ROWS = [each for each in capture.ROWS if each.name.endswith("transformerlens")]
MEMORY_ROWS = [each for each in attention.ROWS if "/memory-" in each.name]
FORWARD_ROWS = [
    each
    for each in (*forward.ROWS, *attention.ROWS, *capture.ROWS, *harvesting.ROWS, *verifying.ROWS)
    if each not in (*PEER_ROWS, *MEMORY_ROWS, harvesting.ROWS[-1])
]
NO_SIZE: Any = None


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    """Threads of models this small wait for each other, the longer the busier the machine is."""
    with one_thread():
        yield


def row(**fields: Any) -> Row:
    return Row("suite/name", "what", "against", lambda *_: measurement([1.0]), **fields)


def measurement(walls: list[float]) -> Measurement:
    """Pairs whose other side took a second."""
    one = [Sample(1.0, 1.0)] * len(walls)
    return Measurement(tuple(Sample(wall, 2 * wall) for wall in walls), tuple(one))


# ---- the rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", FORWARD_ROWS, ids=lambda row: row.name)
def test_a_row_of_one_forward_runs_and_both_sides_agree(one: Row) -> None:
    measured = one.measure(TINY, 1)
    assert len(measured.ours) == len(measured.theirs) == 1
    samples = [sample for sample in (*measured.ours, *measured.theirs) if isinstance(sample, Sample)]
    assert len(samples) == 2
    assert all(sample.wall > 0 for sample in samples)
    assert report.line(Result(one, measured))


@pytest.mark.parametrize("one", loading.ROWS, ids=lambda row: row.name)
def test_a_row_of_loading_runs(one: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    if one.name.startswith(PROCESSES):
        # The processes are started, but import next to nothing.
        monkeypatch.setattr(loading, "python", lambda code, *arguments: python(stand_in(code), *arguments))
    measured = one.measure(TINY, 1)
    sample = measured.ours[0]
    assert isinstance(sample, Sample)
    assert sample.wall > 0


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
        **{f"31b/pattern-{which}": (1.10, "ratio") for which in ("sliding", "full", "all")},
        **{
            f"{shape}/memory-{kind}": (1.01, "ratio")
            for shape in ("31b", "e2b")
            for kind in ("sliding", "full")
        },
        "31b/memory-trace": (1.0, "ratio"),
        **{f"{shape}/collect": (1.05, "ratio") for shape in ("31b", "e2b")},
        **{f"{shape}/collect-transformerlens": (1.0, "ratio") for shape in ("31b", "e2b")},
        "31b/stop-2": (0.35, "ratio"),  # 3 / 12 + 0.1
        "31b/stop-8": (0.85, "ratio"),  # 9 / 12 + 0.1
        **{f"31b/{name}": (1.111, "ratio") for name in ("harvest", "harvest-200000")},  # 1 / 0.9
        "31b/memory-harvest": (1.0, "ratio"),  # of 64 MiB, above the forward and one shard
        "verify/tiny": (3.0, "seconds"),
        "31b/verify": (60.0, "seconds"),
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


# ---- attention, memory and the early stop ------------------------------------------------------------------


def test_the_blocks_whose_pattern_is_read_are_of_their_kinds_and_under_sdpa() -> None:
    pair = twins("31b", TINY)
    kinds = pair.bare.config.layer_types
    found = {kind: attention.last(pair, kind) for kind in attention.KINDS}
    assert {kind: kinds[block] for kind, block in found.items()} == attention.KINDS
    implementations = [each.config._attn_implementation for each in (pair.bare, pair.wrapped, pair.eager)]
    assert implementations == ["sdpa", "sdpa", "eager"]
    assert pair.nnsight_eager._module.config._attn_implementation == "eager"
    own = [id(module) for module in (pair.eager, pair.nnsight._module, pair.nnsight_eager._module, pair.bare)]
    assert len(set(own)) == len(own)
    assert pair.eager.lm_head.weight is pair.bare.lm_head.weight


def test_a_pattern_of_another_block_or_a_forward_that_ran_on_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = twins("31b", TINY)
    with torch.no_grad():
        other = attention.read_pattern("sliding")(pair)
        attention.is_eager_pattern("sliding")(pair, other)
        with pytest.raises(AssertionError, match="tensor 0 differs"):
            attention.is_eager_pattern("full")(pair, other)
        collected = capture.stop_after(8)(pair)
        capture.is_output_of(8)(pair, collected)
        with pytest.raises(AssertionError, match="tensor 0 differs"):
            capture.is_output_of(2)(pair, collected)
        monkeypatch.setattr(capture, "stop_after", lambda _: lambda pair: pair.wrapped(**pair.inputs))
        with pytest.raises(AssertionError, match=r"blocks \[0, 1, 2, 3, 4, 5\] ran"):
            capture.is_output_of(8)(pair, collected)


@pytest.mark.parametrize("one", MEMORY_ROWS, ids=lambda row: row.name)
def test_a_row_of_memory_counts_in_patterns(one: Row) -> None:
    measured = one.measure(TINY, 2)
    assert isinstance(measured, Memory)
    heads = twins(one.name.partition("/")[0], TINY).bare.config.num_attention_heads
    assert measured.unit == TINY.batch * heads * TINY.seq * TINY.seq * 4
    # What is kept adds to the peak, and a few patterns at most; a second forward would double it.
    assert all(0 < ours < 2 * theirs for ours, theirs in zip(measured.ours, measured.theirs, strict=True))
    assert len(set(measured.ours)) == len(set(measured.theirs)) == 1
    assert "MiB" in report.numbers(Result(one, measured))[report.NUMBERS.index("ours")]


def test_the_harvests_memory_is_counted_above_one_shard() -> None:
    measured = harvesting.ROWS[-1].measure(TINY, 1)
    assert isinstance(measured, Memory)
    assert measured.unit == 64 * 2**20
    assert measured.theirs[0] > 4096
    # A shard is held, and nothing of all the rows' size.
    assert 4096 < measured.ours[0] < measured.theirs[0] + 2**20


def test_a_harvest_of_other_numbers_and_a_forward_that_goes_on_are_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = twins("31b", TINY)
    ids = harvesting.texts(TINY, 2)
    with torch.no_grad():
        harvesting.check(pair, ids, TINY)
        changed = ids.clone()
        changed[0, 5] += 1
        harvested = harvesting.harvested(pair, changed, TINY)
        with monkeypatch.context() as patch:
            patch.setattr(harvesting, "harvested", lambda *_: harvested)
            with pytest.raises(AssertionError, match="tensor 0 differs"):
                harvesting.check(pair, ids, TINY)
        monkeypatch.setattr(harvesting, "blocks", lambda _: [torch.nn.Identity()] * 12)
        with pytest.raises(AssertionError, match="did not stop"):
            harvesting.bare(pair, ids, TINY)


def test_a_peak_is_what_was_held_at_once() -> None:

    def run() -> torch.Tensor:
        first = torch.zeros(1_000_000)
        second = torch.zeros(2_000_000)
        del first
        return torch.cat([torch.zeros(250_000), second[:250_000]])

    assert memory.peak(run) == 12_000_000
    assert memory.peak(lambda: torch.softmax(torch.ones(1000, 1000), 0)) == 8_000_000
    before = torch.zeros(1_000_000)
    assert memory.peak(lambda: before.add_(torch.zeros(1))) == 4  # held before, so not counted
    with pytest.raises(AssertionError, match="no allocation"):
        memory.peak(lambda: None)


def test_memory_is_our_peak_above_theirs_in_units() -> None:
    measured = memory.compare(lambda: torch.zeros(750), lambda: torch.zeros(500), 2, unit=500)
    assert measured == Memory((3000, 3000), (2000, 2000), 500)
    assert measured.ratios == [2.0, 2.0]
    assert Result(row(bound=1.0), measured).held is False


# ---- the peer in an environment of its own -----------------------------------------------------------------

STAND_IN = """
import json, shutil, sys
print(json.dumps({"weights": WEIGHTS, "versions": VERSIONS}), flush=True)
for line in sys.stdin:
    request, _, path = line.strip().partition(" ")
    if request == "keep":
        shutil.copy(KEPT, path)
    elif END:
        sys.exit("ModuleNotFoundError: No module named 'lens'")
    print(json.dumps(True if request == "keep" else [0.5, 0.25]), flush=True)
"""


@pytest.fixture
def stand_in_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A process that answers as the peer does: with these outputs, and this number of weights."""

    def start(kept: list[torch.Tensor], weights: int, *, release: str = "4.3.0", end: bool = False) -> None:
        torch.save(kept, tmp_path / "kept.pt")
        values = {"WEIGHTS": weights, "KEPT": str(tmp_path / "kept.pt"), "END": end}
        values["VERSIONS"] = f"transformer-lens {release}, torch 2.13.0"
        lines = [f"{name} = {value!r}" for name, value in values.items()]
        (tmp_path / "server.py").write_text("\n".join(lines) + STAND_IN)
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "python").unlink(missing_ok=True)
        (tmp_path / "bin" / "python").symlink_to(sys.executable)
        monkeypatch.setattr(peer, "SERVER", tmp_path / "server.py")
        monkeypatch.setenv(peer.PEERS, str(tmp_path))

    return start


def right_answer() -> tuple[list[torch.Tensor], int]:
    pair = twins("31b", TINY)
    with torch.no_grad():
        kept = forward.hook_outputs(pair)
    return kept, sum(weight.numel() for weight in pair.bare.parameters())


@pytest.mark.skipif(peer.PEERS not in os.environ, reason=f"{peer.PEERS} names no environment of the peer")
@pytest.mark.parametrize("one", PEER_ROWS, ids=lambda row: row.name)
def test_the_peer_itself_agrees_and_is_timed(one: Row) -> None:
    measured = one.measure(TINY, 2)
    assert isinstance(measured, Measurement)
    samples = [sample for sample in (*measured.ours, *measured.theirs) if isinstance(sample, Sample)]
    assert len(samples) == 2
    assert all(sample.wall > 0 for sample in samples)


def test_the_peer_is_asked_a_call_at_a_time_and_timed_by_itself(stand_in_peer: Callable[..., None]) -> None:
    stand_in_peer(*right_answer())
    measured = PEER_ROWS[0].measure(TINY, 3)
    assert isinstance(measured, Measurement)
    assert measured.theirs == (Sample(0.5, 0.25),) * 3
    assert all(0 < sample.wall != 0.5 for sample in measured.ours)


def test_a_peer_that_computes_something_else_is_not_measured(stand_in_peer: Callable[..., None]) -> None:
    kept, weights = right_answer()
    stand_in_peer([*kept[:-1], kept[-1] + 0.01], weights)
    with pytest.raises(AssertionError, match="tensor 5 differs"):
        PEER_ROWS[0].measure(TINY, 1)
    stand_in_peer(kept, weights + 1)
    with pytest.raises(AssertionError, match=f"TransformerLens has {weights + 1} weights"):
        PEER_ROWS[0].measure(TINY, 1)


def test_a_peer_that_ends_is_not_measured_and_says_why(stand_in_peer: Callable[..., None]) -> None:
    stand_in_peer(*right_answer(), end=True)
    with pytest.raises(NotMeasured, match=r"process ended: ModuleNotFoundError: No module named 'lens'$"):
        PEER_ROWS[0].measure(TINY, 1)


def test_another_release_of_the_peer_is_not_measured(stand_in_peer: Callable[..., None]) -> None:
    stand_in_peer(*right_answer(), release="4.30.0")
    with pytest.raises(NotMeasured, match=r"4\.3 is compared with, not transformer-lens 4\.30\.0, torch"):
        PEER_ROWS[0].measure(TINY, 1)


def test_a_peer_without_an_environment_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(peer.PEERS, str(tmp_path))
    with pytest.raises(NotMeasured, match=f"no environment for TransformerLens at {tmp_path}"):
        PEER_ROWS[0].measure(TINY, 1)


def test_an_environment_that_cannot_be_made_is_a_reason_and_is_not_taken_for_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(peer.PEERS, raising=False)
    monkeypatch.setattr(peer, "OWN", tmp_path / "own")
    fails = "import sys; sys.exit('noise\\nERROR: No matching distribution found')"
    monkeypatch.setattr(peer, "make", lambda place: peer.run([sys.executable, "-c", fails]))
    for _ in range(2):
        with pytest.raises(
            NotMeasured, match=r"cannot be made: ERROR: No matching distribution found\. Name"
        ):
            peer.environment()
    monkeypatch.setattr(peer, "make", lambda place: place.mkdir())
    assert peer.environment() == tmp_path / "own"
    monkeypatch.setattr(peer, "make", lambda place: pytest.fail("made twice"))
    assert peer.environment() == tmp_path / "own"


def test_a_row_that_cannot_be_measured_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_size: Any, _pairs: int) -> Measurement:
        raise NotMeasured("there is no network")

    result = run.measured(Row("suite/name", "what", "against", measure, bound=1.0), 1)
    assert (result.held, result.sure) == (None, True)
    assert report.line(result) == "suite/name: not measured: there is no network"
    page = report.page([result, result], threads=2, quick=False, load=[0.0])
    assert "| what | against | 1.000 | not measured |" in page
    assert page.count("**Not measured:** there is no network.") == 1
    assert len({line.count("|") for line in page.splitlines() if line.startswith("| ")}) == 1
    assert report.table([result]).row_count == 1


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


def test_tensors_are_equal_bit_for_bit_or_within_a_tolerance() -> None:
    one, near, far = (torch.ones(2) + shift for shift in (0.0, 1e-6, 1e-2))
    insist(one, one.clone())
    insist([one], [near], 1e-5)
    for other, tolerance in ((near, 0.0), (far, 1e-5), (torch.ones(1), 1e-5), (one * torch.nan, 1e-5)):
        with pytest.raises(AssertionError, match="tensor 0 differs"):
            insist(one, other, tolerance)


def test_one_thread_is_undone() -> None:
    torch.set_num_threads(2)  # the fixture puts back what it found
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


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
