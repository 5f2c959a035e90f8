"""What a harvest leaves: killed, on a full disk, at a number that is not finite, with a damaged file."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from gemloupe import Store, harvest
from gemloupe.errors import DamagedStore, HarvestStopped
from gemloupe.harvesting import shards
from gemloupe.testing import tiny
from tests.core.models import SEED, Case
from tests.harvesting.data import OUTPUT, files, forwards, model, rows_of_ids
from tests.harvesting.killed import OPTIONS, TEXTS

# By hand: GEMLOUPE_KILLS=50
KILLS = int(os.environ.get("GEMLOUPE_KILLS", "10"))
posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="the killed process is forked")


class Killer:
    """Starts harvests in processes of their own, and kills them."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "killed.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )

    def run(self, out: Path, *, renames: int = 0, after: float | None = None) -> tuple[bool, float]:
        """Whether the harvest was killed, and how long it ran."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{json.dumps([str(out), renames, after])}\n")
        self.process.stdin.flush()
        killed, seconds = json.loads(self.process.stdout.readline())
        return killed, seconds


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    made = Killer()
    yield made
    made.process.communicate()


@pytest.fixture(scope="module")
def uninterrupted(killer: Killer, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], float]:
    """The files of a run that nobody killed, and how long it took."""
    out = tmp_path_factory.mktemp("whole")
    killed, seconds = killer.run(out)
    assert not killed
    store = Store(out)
    assert store.complete
    assert len(store.shards) >= 8
    return files(out), seconds


def complete(out: Path) -> dict[str, int]:
    """The shards that have a record, and when they were written."""
    written = {path.stem: path for path in out.glob("shards/*.json")}
    return {
        path.name: path.stat().st_mtime_ns
        for path in out.glob("shards/*")
        if path.name.partition(".")[0] in written and path.is_file()
    }


def take_up(killer: Killer, out: Path, wanted: dict[str, bytes]) -> None:
    """End the run, and compare every file with the uninterrupted run's."""
    if (out / "index.json").exists():
        for record in Store(out).shards:  # what was left opens, and is right
            assert (out / "shards" / record.file).read_bytes() == wanted[f"shards/{record.file}"]
    before = complete(out)
    killed, _ = killer.run(out)
    assert not killed
    found = files(out)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name] != wanted[name]] == []
    after = complete(out)
    assert {name: after[name] for name in before} == before  # nothing was written twice


@posix
@pytest.mark.parametrize("number", range(KILLS))
def test_a_run_killed_at_a_random_moment_resumes_bit_for_bit(
    number: int, killer: Killer, uninterrupted: tuple[dict[str, bytes], float], tmp_path: Path
):
    wanted, seconds = uninterrupted
    draw = random.Random(f"{SEED} {number}")
    for _ in range(draw.choice((1, 1, 2, 3))):  # a run that was taken up may be killed as well
        killer.run(tmp_path, after=draw.uniform(0, 1.05 * seconds))
    take_up(killer, tmp_path, wanted)


@posix
@pytest.mark.parametrize("renames", [1, 2, 3, 4, 5, 99, 100])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_run_killed_at_a_rename_resumes_bit_for_bit(
    renames: int, before: bool, killer: Killer, uninterrupted: tuple[dict[str, bytes], float], tmp_path: Path
):
    wanted, _ = uninterrupted
    written = len(wanted)
    renames = {99: written, 100: written + 1}.get(renames, renames)  # the statistics of all, the index
    killed, _ = killer.run(tmp_path, renames=-renames if before else renames)
    assert killed
    if renames > 1 or not before:
        index, last = 1, written - 2  # renamed before all shards and after them
        assert len(Store(tmp_path).shards) == min(renames - index - before, last - index + 1) // 3
    take_up(killer, tmp_path, wanted)


def test_this_process_writes_what_the_killed_ones_wrote(
    uninterrupted: tuple[dict[str, bytes], float], tmp_path: Path
):
    harvest(tiny("e2b"), TEXTS, out=tmp_path, **OPTIONS)
    assert files(tmp_path) == uninterrupted[0]


# ---- damage ------------------------------------------------------------------------------------------------


def small(out: Path, **options: Any) -> Store:
    call = {"tokens_per_batch": 15, "shard_bytes": 6000, "progress": False} | options
    return harvest(model(), rows_of_ids(), OUTPUT, out, **call)


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_changed_shard_is_found_by_its_checksum_and_named(tmp_path: Path):
    store = small(tmp_path)
    wanted, record = files(tmp_path), store.shards[2]
    flip(tmp_path / "shards" / record.file)
    damaged = Store(tmp_path)
    assert len(damaged[OUTPUT][:3]) == 3  # of a shard that is whole
    with pytest.raises(
        DamagedStore, match=rf"shards/{record.file} was changed: its checksum differs"
    ) as error:
        damaged[OUTPUT][:]
    assert f"Remove {tmp_path}/shards/{record.file.partition('.')[0]}.*" in str(error.value)
    with pytest.raises(DamagedStore, match=record.file):
        store.verify()
    assert len(Store(tmp_path, verify=False)[OUTPUT][:]) == len(store)
    # What the message says to do mends it, and runs no other batch.
    for path in tmp_path.glob(f"shards/{record.file.partition('.')[0]}.*"):
        path.unlink()
    with forwards(model()) as ran:
        small(tmp_path)
    assert len(ran) == 1 + len(record.batches)  # one batch to compare, and those that are missing
    assert files(tmp_path) == wanted


@pytest.mark.parametrize(
    "change", [lambda path: os.truncate(path, 100), lambda path: path.unlink()], ids=["cut", "gone"]
)
def test_a_shard_that_was_cut_or_is_gone_is_named_when_the_store_is_opened(change: Any, tmp_path: Path):
    record = small(tmp_path).shards[1]
    change(tmp_path / "shards" / record.file)
    with pytest.raises(DamagedStore, match=rf"shards/{record.file} (was cut|is gone)"):
        Store(tmp_path)


def test_a_run_is_not_taken_up_over_a_damaged_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fills_up(monkeypatch, after=7, error=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(HarvestStopped):
        small(tmp_path)
    monkeypatch.undo()
    record = Store(tmp_path).shards[0]
    flip(tmp_path / "shards" / record.file)
    with forwards(model()) as ran, pytest.raises(DamagedStore, match=record.file):
        small(tmp_path)
    assert ran == []
    flip(tmp_path / "shards" / record.file)
    flip(tmp_path / "shards" / record.statistics, -3)
    with pytest.raises(DamagedStore, match=record.statistics):
        small(tmp_path)


def test_a_damaged_index_or_record_is_named(tmp_path: Path):
    small(tmp_path)
    index = (tmp_path / "index.json").read_text()
    (tmp_path / "index.json").write_text(index[:100])
    with pytest.raises(DamagedStore, match=r"index\.json cannot be read"):
        Store(tmp_path)
    (tmp_path / "index.json").write_text(index.replace('"complete": true', '"complete": false'))
    record = min(tmp_path.glob("shards/*.json"))
    record.write_text("{}")
    with pytest.raises(DamagedStore, match=rf"{record.name} cannot be read"):
        Store(tmp_path)


def test_what_a_run_of_other_processes_left_unfinished_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wanted = files(small(tmp_path / "whole").path)
    fills_up(monkeypatch, after=7, error=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(HarvestStopped):
        small(tmp_path / "s")
    monkeypatch.undo()
    left = tmp_path / "s" / "shards"
    (left / "0000009999.safetensors").write_bytes(b"no record")
    (left / ".unfinished").mkdir(exist_ok=True)
    (left / ".unfinished" / "0000000004.json").write_bytes(b"half a")
    assert files(small(tmp_path / "s").path) == wanted


# ---- a full disk -------------------------------------------------------------------------------------------


def fills_up(monkeypatch: pytest.MonkeyPatch, *, after: int, error: Exception) -> None:
    """Let every write fail after so many files."""
    write, left = shards._whole, iter(range(after))

    def whole(path: Path, how: Any) -> None:
        def full(place: Path) -> None:
            if next(left, None) is None:
                place.write_bytes(b"half a fi")
                raise error
            how(place)

        write(path, full)

    monkeypatch.setattr(shards, "_whole", whole)


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL, ids=["os", "quota", "safetensors"])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 7])
def test_a_full_disk_stops_the_run_and_the_store_still_opens(
    error: Exception, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wanted = files(small(tmp_path / "whole").path)
    out = tmp_path / "s"
    fills_up(monkeypatch, after=after, error=error)
    with pytest.raises(HarvestStopped, match="the disk is full") as stopped:
        small(out)
    shards_there = max(after - 1, 0) // 3
    kept = f"{shards_there} complete shards" if after else "Nothing was harvested yet"
    assert kept in str(stopped.value)
    assert "Make room and make the same call again" in str(stopped.value)
    assert [path for path in out.rglob("*") if path.is_file() and path.read_bytes() == b"half a fi"] == []
    monkeypatch.undo()
    if after:
        store = Store(out)
        assert not store.complete
        assert "not complete" in repr(store)
        assert len(store) == sum(record.rows for record in store.shards)
        assert len(store.shards) == shards_there
        if store.shards:
            rows = store[OUTPUT][:]
            assert len(rows) == len(store)
            torch.testing.assert_close(store.statistics[OUTPUT].mean, rows.double().mean(0))
    assert files(small(out).path) == wanted


def test_another_failure_of_the_disk_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fills_up(monkeypatch, after=4, error=OSError(errno.EIO, "Input/output error"))
    with pytest.raises(
        HarvestStopped, match=r"cannot be written \(.*Input/output error\), at shard"
    ) as error:
        small(tmp_path)
    assert "disk is full" not in str(error.value)


# ---- not finite --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_the_first_value_that_is_not_finite_is_named(number: float, tmp_path: Path):
    of = tiny("e2b")
    # A hook of torch's own is called when nnsight has served the output: the next block's input is the first.
    handle = of.layers[4]._module.register_forward_hook(lambda _m, _a, output: spoil(output, number))
    texts = rows_of_ids()
    values = ["logits", "layers.*.layer_output", "layers[3:7].layer_input"]
    try:
        with pytest.raises(HarvestStopped) as error:
            harvest(of, texts, values, tmp_path, tokens_per_batch=14, shard_bytes=9000, progress=False)
    finally:
        handle.remove()
    message = str(error.value)
    assert f"layers[5].layer_input is {number} at position 8 of sequence" in message
    assert "Complete shards stay" in message
    store = Store(tmp_path)
    assert not store.complete
    assert torch.isfinite(store["logits"][:]).all() if store.shards else True


def spoil(output: torch.Tensor, number: float) -> torch.Tensor:
    """One number of the ninth token of a batch whose longest text has nine."""
    if output.shape[1] == 9:
        output = output.clone()
        output[0, 8, 3] = number
    return output


def test_a_number_that_float16_does_not_hold(tmp_path: Path):
    of = tiny("e2b")
    handle = of.layers[2]._module.register_forward_hook(lambda _m, _a, output: output * 1e6)
    try:
        with pytest.raises(HarvestStopped, match="float16 ends at 65504: store bfloat16 or float32"):
            harvest(of, rows_of_ids(), "layers[3].layer_input", tmp_path, dtype=torch.float16, progress=False)
    finally:
        handle.remove()


def test_hidden_keys_in_scores_are_no_fault_and_nan_in_them_is(tmp_path: Path):
    path = "layers[4].self_attn.attention_scores"
    of = Case("e2b").model()
    assert harvest(of, rows_of_ids(), path, tmp_path / "s", progress=False)[path][:].isneginf().any()
    spoilt = tiny("e2b")
    with torch.no_grad():
        spoilt.layers[4]._module.self_attn.q_norm.weight[0] = torch.nan
    with pytest.raises(HarvestStopped, match=r"attention_scores is nan at position \d+ of sequence"):
        harvest(spoilt, rows_of_ids(), path, tmp_path / "nan", progress=False)
