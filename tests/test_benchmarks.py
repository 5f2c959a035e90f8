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

from benchmarks import (
    attention,
    capture,
    compared,
    forward,
    harvesting,
    loading,
    memory,
    peer,
    report,
    run,
    verifying,
)
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
KINDS = {"transformerlens": peer.TRANSFORMERLENS, "nnterp": peer.NNTERP}
PEER_ROWS = [each for each in compared.ROWS if each.name.endswith(tuple(KINDS))]
JOB_ROWS = [
    each for each in PEER_ROWS if each.name.startswith(("31b/", "e2b/")) and "memory" not in each.name
]
START_ROWS = [each for each in PEER_ROWS if each.name.startswith(("import/", "tree/"))]
MEMORY_ROWS = [each for each in attention.ROWS if "/memory-" in each.name]
FORWARD_ROWS = [
    each
    for suite in (forward, attention, capture, compared, harvesting, verifying)
    for each in suite.ROWS
    if each not in (*PEER_ROWS, *MEMORY_ROWS) and "/memory-" not in each.name
]


def kind_of(row: Row) -> peer.Kind:
    return KINDS[row.name.rpartition("-")[2]]


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
        "31b/one-hooks": (1.05, "ratio"),
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


@pytest.mark.parametrize("which", ["hooks", "nnsight"])
def test_the_memory_of_every_output_is_counted_in_outputs(which: str) -> None:
    row = next(each for each in compared.ROWS if each.name == f"31b/memory-outputs-{which}")
    measured = row.measure(TINY, 1)
    assert isinstance(measured, Memory)
    assert measured.unit == TINY.batch * TINY.seq * TINY.hidden * 4
    # Every block's output is held on both sides at once.
    assert min(*measured.ours, *measured.theirs) > TINY.layers * measured.unit
    assert abs(measured.ratios[0]) < 1


# ---- peers in environments of their own --------------------------------------------------------------------

STAND_IN = """
import json, shutil, sys
print(json.dumps({"weights": WEIGHTS, "versions": VERSIONS}), flush=True)
for line in sys.stdin:
    request, job, *path = line.strip().split(" ", 2)
    if request == "keep":
        shutil.copy(f"{KEPT}/{job}.pt", path[0])
    elif END:
        sys.exit("ModuleNotFoundError: No module named 'lens'")
    answers = {"keep": True, "time": [0.5, 0.25], "peak": 12345}
    print(json.dumps(answers[request]), flush=True)
"""

StandIn = Callable[..., None]


@pytest.fixture
def stand_in_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Processes that answer as the peers do: with these tensors of each job, and this number of weights."""

    def start(
        kept: dict[str, list[torch.Tensor]],
        weights: int,
        *,
        releases: dict[str, str] = {},  # noqa: B006 (read alone)
        end: bool = False,
    ) -> None:
        for job, tensors in kept.items():
            torch.save(tensors, tmp_path / f"{job}.pt")
        for kind in KINDS.values():
            release = releases.get(kind.name, f"{kind.release}.0")
            values = {"WEIGHTS": weights, "KEPT": str(tmp_path), "END": end}
            values["VERSIONS"] = f"{kind.package} {release}, torch 2.13.0"
            lines = [f"{name} = {value!r}" for name, value in values.items()]
            (tmp_path / kind.server.name).write_text("\n".join(lines) + STAND_IN)
            monkeypatch.setenv(kind.variable, str(tmp_path))
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "python").unlink(missing_ok=True)
        (tmp_path / "bin" / "python").symlink_to(sys.executable)
        monkeypatch.setattr(peer, "PLACE", tmp_path)

    return start


def right_answer(shape: str = "31b") -> tuple[dict[str, list[torch.Tensor]], int]:
    """What every job gives, as plain transformers has it where it can, and how many weights there are."""
    pair = twins(shape, TINY)
    with torch.no_grad():
        kept = {
            "outside": [forward.plain(pair)],
            "one": [compared.hook_one(pair)],
            "outputs": forward.hook_outputs(pair),
            "patterns": list(attention.eager_patterns(pair)),
            "edit": [forward.hook_edit(pair)],
            "generate": forward.hook_steps(compared.STEPS)(pair),
        }
    return kept, sum(weight.numel() for weight in pair.bare.parameters())


def lacking(row: Row) -> bool:
    return kind_of(row).variable not in os.environ


@pytest.mark.parametrize("one", PEER_ROWS, ids=lambda row: row.name)
def test_the_peer_itself_agrees_and_is_measured(one: Row) -> None:
    if lacking(one):
        pytest.skip(f"{kind_of(one).variable} names no environment of the peer")
    measured = one.measure(TINY, 2)
    assert len(measured.ours) == len(measured.theirs) == 2
    assert Result(one, measured).spread.median


@pytest.mark.parametrize("one", JOB_ROWS, ids=lambda row: row.name)
def test_a_peer_is_asked_a_run_at_a_time_and_timed_by_itself(one: Row, stand_in_peers: StandIn) -> None:
    stand_in_peers(*right_answer(one.name.partition("/")[0]))
    measured = one.measure(TINY, 3)
    assert isinstance(measured, Measurement)
    assert measured.theirs == (Sample(0.5, 0.25),) * 3
    assert all(0 < sample.wall != 0.5 for sample in measured.ours)


@pytest.mark.parametrize("one", JOB_ROWS, ids=lambda row: row.name)
def test_a_peer_that_computes_something_else_is_not_measured(one: Row, stand_in_peers: StandIn) -> None:
    kept, weights = right_answer(one.name.partition("/")[0])
    for job, tensors in kept.items():
        at = TINY.layers - 1 if job == "generate" else -1
        tensors[at] = tensors[at] + 0.01
    stand_in_peers(kept, weights)
    with pytest.raises(AssertionError, match=r"tensor \d+ differs"):
        one.measure(TINY, 1)


def test_a_generation_of_other_steps_is_not_measured(stand_in_peers: StandIn) -> None:
    kept, weights = right_answer()
    stand_in_peers(kept | {"generate": kept["generate"][: -TINY.layers]}, weights)
    one = next(each for each in JOB_ROWS if each.name == "31b/generate-nnterp")
    with pytest.raises(AssertionError, match="the steps have other shapes"):
        one.measure(TINY, 1)


@pytest.mark.parametrize("name", KINDS)
def test_a_peers_memory_is_asked_of_it(name: str, stand_in_peers: StandIn) -> None:
    stand_in_peers(*right_answer())
    row = next(each for each in PEER_ROWS if each.name == f"31b/memory-outputs-{name}")
    measured = row.measure(TINY, 2)
    assert isinstance(measured, Memory)
    assert measured.theirs == (12345, 12345)
    assert min(measured.ours) > TINY.layers * measured.unit


@pytest.mark.parametrize("one", START_ROWS, ids=lambda row: row.name)
def test_the_start_of_a_peer_is_timed_in_its_own_python(
    one: Row, stand_in_peers: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_peers({}, 0)
    # The processes are started, but import next to nothing.
    monkeypatch.setattr(compared, "python", lambda code, *arguments: python(stand_in(code), *arguments))
    for table in (compared.IMPORTS, compared.WRAPS):
        compile("\n".join(table.values()), "benchmark", "exec")
    monkeypatch.setattr(compared, "IMPORTS", dict.fromkeys(KINDS.values(), "pass"))
    monkeypatch.setattr(compared, "WRAPS", dict.fromkeys(KINDS.values(), "pass"))
    monkeypatch.setattr(compared, "WRAP", "import json; print(json.dumps([0.5, 0.25]))")
    measured = one.measure(TINY, 1)
    assert isinstance(measured, Measurement)
    assert all(sample.wall > 0 for sample in (*measured.ours, *measured.theirs))


def test_a_peer_with_other_weights_is_not_measured(stand_in_peers: StandIn) -> None:
    kept, weights = right_answer()
    stand_in_peers(kept, weights + 1)
    for one in (PEER_ROWS[0], PEER_ROWS[1]):
        with pytest.raises(AssertionError, match=f"{kind_of(one).name} has {weights + 1} weights"):
            one.measure(TINY, 1)


def test_a_peer_that_ends_is_not_measured_and_says_why(stand_in_peers: StandIn) -> None:
    stand_in_peers(*right_answer(), end=True)
    with pytest.raises(NotMeasured, match=r"process ended: ModuleNotFoundError: No module named 'lens'$"):
        JOB_ROWS[0].measure(TINY, 1)


def test_another_release_of_a_peer_is_not_measured(stand_in_peers: StandIn) -> None:
    stand_in_peers(*right_answer(), releases={"TransformerLens": "4.30.0"})
    one = next(each for each in JOB_ROWS if kind_of(each) is peer.TRANSFORMERLENS)
    with pytest.raises(NotMeasured, match=r"4\.3 is compared with, not transformer-lens 4\.30\.0, torch"):
        one.measure(TINY, 1)


def test_the_releases_are_those_of_the_requirements() -> None:
    for kind in KINDS.values():
        assert f"\n{kind.package}=={kind.release}." in kind.requirements.read_text()
        assert kind.server.is_file()


@pytest.mark.parametrize("one", PEER_ROWS, ids=lambda row: row.name)
def test_a_peer_without_an_environment_is_not_measured(
    one: Row, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(kind_of(one).variable, str(tmp_path))
    with pytest.raises(NotMeasured, match=f"no environment for {kind_of(one).name} at {tmp_path}"):
        one.measure(TINY, 1)


@pytest.mark.parametrize("name", KINDS)
def test_an_environment_that_cannot_be_made_is_a_reason_and_is_not_taken_for_one(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind = KINDS[name]
    monkeypatch.delenv(kind.variable, raising=False)
    monkeypatch.setattr(peer, "ROOT", tmp_path)
    fails = "import sys; sys.exit('noise\\nERROR: No matching distribution found')"
    monkeypatch.setattr(peer, "make", lambda kind: peer.run([sys.executable, "-c", fails]))
    for _ in range(2):
        with pytest.raises(
            NotMeasured, match=rf"cannot be made: ERROR: No matching distribution found\. Name .* --{name} "
        ):
            peer.environment(kind)
    monkeypatch.setattr(peer, "make", lambda kind: kind.own.mkdir())
    assert peer.environment(kind) == tmp_path / f".venv-{name}"
    monkeypatch.setattr(peer, "make", lambda kind: pytest.fail("made twice"))
    assert peer.environment(kind) == tmp_path / f".venv-{name}"


def test_a_row_that_cannot_be_measured_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_size: Any, _pairs: int) -> Measurement:
        raise NotMeasured("there is no network")

    def differ(_size: Any, _pairs: int) -> Measurement:
        raise AssertionError("tensor 3 differs")

    assert run.measured(Row("suite/name", "what", "against", differ), 1).reason == "tensor 3 differs"
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
