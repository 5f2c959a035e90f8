"""Several processes, under `torchrun`, with gloo on the CPU."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from gemloupe import StandardizedTransformer, Store, harvest
from gemloupe.errors import DamagedStore, HarvestStopped
from gemloupe.harvesting.shards import ShardFolder
from gemloupe.testing import tiny_module, tiny_tokenizer
from tests.harvesting.data import OUTPUTS, files, forwards, in_order, lose, model, rows_of_ids
from tests.harvesting.test_survives import fills_up

VALUES = [OUTPUTS, "layers[4].self_attn.attention_probabilities"]
OPTIONS: dict[str, Any] = {"tokens_per_batch": 20, "shard_bytes": 12_000}
ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def launch(folder: Path, calls: dict[str, dict[str, Any]], model: Path | None = None) -> dict[str, list[Any]]:
    """What each of two processes answers to each call, which is a harvest or what is done about one."""
    answers = folder / "answers"
    answers.mkdir()
    asked = [
        {"values": VALUES, "out": str(folder / "s"), "options": OPTIONS} | call for call in calls.values()
    ]
    place = None if model is None else str(model)
    done = subprocess.run(
        [*TORCHRUN, str(Path(__file__).parent / "rank.py"), json.dumps([place, asked, str(answers)])],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(each) for each in (ROOT, *sys.path) if str(each)),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    of_rank = [json.loads((answers / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: [found[i] for found in of_rank] for i, name in enumerate(calls)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """What one process writes."""
    out = tmp_path_factory.mktemp("alone") / "s"
    return harvest(model(), rows_of_ids(), VALUES, out, progress=False, **OPTIONS)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, alone: Store) -> tuple[Path, dict[str, list[Any]]]:
    """A directory in which two processes made harvests, one after another, and what they answered."""
    folder = tmp_path_factory.mktemp("two")
    copytree(alone.path, folder / "of one")
    begun_by_one(folder / "begun by one")
    calls = {
        "torchrun": {"out": "torchrun"},
        "a group that is there": {"out": "joined", "joined": True},
        "taken up": {"out": "joined", "lose": [0, -1]},
        "for one": {"out": "for one"},
        "lost": {"out": "for one", "lose": [0, 2], "other_data": 0},
        "full": {"out": "full", "full": 1},
        "made room": {"out": "full"},
        "of one": {"out": "of one", "lose": [0, 2, 5]},
        "begun by one": {"out": "begun by one"},
        "elsewhere": {"out": "elsewhere", "elsewhere": 1},
        "other weights": {"out": "other weights", "other_weights": 1},
        "other data": {"out": "other data", "other_data": 1},
        "refused": {"out": "refused", "options": {"positions": "first"}},
    }
    for call in calls.values():
        call["out"] = str(folder / call["out"])
    return folder, launch(folder, calls)


def begun_by_one(out: Path) -> None:
    """A harvest of one process that its disk ended after two shards."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(HarvestStopped):
        fills_up(patch, after=7, error=OSError(errno.ENOSPC, "No space left on device"))
        harvest(model(), rows_of_ids(), VALUES, out, progress=False, **OPTIONS)
    assert len(Store(out).shards) == 2


def same_rows(one: Store, other: Store) -> None:
    assert one.paths == other.paths
    for path in (*one.paths, "token_ids", "positions", "sequences"):
        assert torch.equal(in_order(one, path), in_order(other, path)), path
    for path, found in one.statistics.items():
        torch.testing.assert_close(found.mean, other.statistics[path].mean)
        torch.testing.assert_close(found.variance, other.statistics[path].variance)


@pytest.mark.parametrize("name", ["torchrun", "a group that is there"])
def test_two_processes_write_the_rows_of_one(name: str, alone: Store, two: Any):
    folder, answers = two
    batches = sorted(batch for record in alone.shards for batch in record.batches)
    assert len(batches) > 3
    assert answers[name] == [[len(alone), True, batches]] * 2
    store = Store(folder / ("torchrun" if name == "torchrun" else "joined"))
    assert store.index.processes == 2
    # Each wrote shards of its own share, and both some.
    of_share = {frozenset(batch % 2 for batch in record.batches) for record in store.shards}
    assert of_share == {frozenset({0}), frozenset({1})}
    same_rows(store, alone)


def test_a_run_of_two_is_taken_up_by_two_bit_for_bit(two: Any):
    folder, answers = two
    assert answers["taken up"] == answers["a group that is there"]
    assert files(folder / "joined") == files(folder / "torchrun")


def test_a_run_of_two_is_taken_up_by_one(alone: Store, two: Any):
    folder, answers = two
    assert answers["lost"][0][0] == "BadArgument"  # the shards were removed, and nothing was made
    assert len(list((folder / "for one").glob("shards/*.json"))) == len(Store(folder / "torchrun").shards) - 2
    of = model()
    with forwards(of) as ran:
        harvest(of, rows_of_ids(), VALUES, folder / "for one", progress=False, **OPTIONS)
    assert 0 < len(ran) < len(answers["torchrun"][0][2])
    same_rows(Store(folder / "for one"), alone)


@pytest.mark.parametrize("name", ["of one", "begun by one"])
def test_a_run_of_one_is_taken_up_by_two_and_by_one_again_bit_for_bit(name: str, alone: Store, two: Any):
    folder, answers = two
    wanted = files(alone.path)
    assert len(alone.shards) >= 6
    assert [answer[1] for answer in answers[name]] == [True, True]
    assert files(folder / name) == wanted
    for number in (0, 3):
        lose(folder / name, number)
    with forwards(model()) as ran:
        harvest(model(), rows_of_ids(), VALUES, folder / name, progress=False, **OPTIONS)
    lost = [*alone.shards[0].batches, *alone.shards[3].batches]
    assert len(ran) == 1 + len(lost)  # one batch to compare
    assert files(folder / name) == wanted


def test_shards_that_do_not_belong_together_are_refused_and_rows_are_counted(alone: Store, tmp_path: Path):
    out = tmp_path / "s"
    copytree(alone.path, out)
    (out / "index.json").unlink()
    record = json.loads((out / "shards" / alone.shards[1].file).with_suffix(".json").read_text())
    record["batches"] = [*record["batches"], 99]
    (out / "shards" / alone.shards[1].file).with_suffix(".json").write_text(json.dumps(record))
    with pytest.raises(
        DamagedStore, match=rf"{alone.shards[1].file} holds other batches than belong together"
    ):
        harvest(model(), rows_of_ids(), VALUES, out, progress=False, **OPTIONS)


def test_a_store_of_which_shards_vanish_meanwhile_is_not_called_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write = ShardFolder.write

    def lossy(self: ShardFolder, *args: Any, **kwargs: Any) -> Any:
        record = write(self, *args, **kwargs)
        if len(self.records()) == 3:
            lose(self.store, 0)
        return record

    monkeypatch.setattr(ShardFolder, "write", lossy)
    with pytest.raises(DamagedStore, match=r"holds \d+ of \d+ batches where all were written"):
        harvest(model(), rows_of_ids(), VALUES, tmp_path / "s", progress=False, **OPTIONS)
    assert not Store(tmp_path / "s").complete


def test_processes_that_write_to_different_directories_are_refused(two: Any):
    folder, answers = two
    first, second = answers["elsewhere"]
    assert second[0] == "BadArgument"
    assert "process 1 does not see the directory" in second[1]
    assert "give a directory that every process sees" in second[1]
    assert first[0] == "HarvestStopped"
    assert not list(folder.glob("elsewhere*/shards/*"))


def test_processes_with_different_weights_are_refused(two: Any):
    folder, answers = two
    assert [answer[0] for answer in answers["other weights"]] == ["BadArgument"] * 2
    assert not (folder / "other weights").exists()


def test_what_stops_one_process_stops_all_with_its_reason(alone: Store, two: Any):
    folder, answers = two
    first, second = answers["full"]
    assert (first[0], second[0]) == ("HarvestStopped", "HarvestStopped")
    assert first[1].startswith("harvest stopped, because process 1 did: harvest stopped: the disk is full")
    assert second[1].startswith("harvest stopped: the disk is full")
    assert answers["made room"] == answers["torchrun"]
    assert files(folder / "full") == files(folder / "torchrun")


def test_processes_that_are_given_different_data_are_refused(two: Any):
    folder, answers = two
    assert [answer[0] for answer in answers["other data"]] == ["BadArgument"] * 2
    text = "was given another harvest (model, values, options or data) than process"
    assert all(text in answer[1] for answer in answers["other data"])
    assert not (folder / "other data").exists()


def test_a_refusal_reaches_every_process(two: Any):
    folder, answers = two
    assert all("positions='first'; choose one of" in answer[1] for answer in answers["refused"])
    assert not (folder / "refused").exists()


DIVIDED = [
    "layers.*.layer_output",
    "layers[3].self_attn.attention_queries",
    "layers[3].self_attn.own_keys",
    "layers[3].self_attn.attention_values",
    "layers[3].self_attn.attention_probabilities",
    "layers[3].self_attn.attention_head_outputs",
    "layers[3].self_attn.attention_projection",
    "layers[1].mlp.mlp_neurons",
    "layers[1].mlp.mlp_output",
    "logits",
]
MIXTURE = ["layers[2].mlp.expert_outputs", "layers[2].mlp.routed_output", "layers[2].mlp.expert_indices"]


@pytest.mark.skipif(
    Version(transformers.__version__) >= Version("5.24"),
    reason="nnsight 0.8.1 reads a name that transformers 5.24 moved, and wraps no divided model",
)
@pytest.mark.parametrize("shape", ["31b", "26b-a4b"])
def test_a_model_that_the_processes_hold_between_them_gives_whole_values(shape: str, tmp_path: Path):
    # Two of everything that is divided by two.
    two: dict[str, Any] = {"num_global_key_value_heads": 2} if shape == "26b-a4b" else {}
    module = tiny_module(shape, **two)
    module.save_pretrained(tmp_path / "model")
    values = [*DIVIDED, *(MIXTURE if shape == "26b-a4b" else ())]
    answers = launch(tmp_path, {"divided": {"values": values}}, tmp_path / "model")
    assert [answer[1] for answer in answers["divided"]] == [True, True]
    whole = StandardizedTransformer(module, tokenizer=tiny_tokenizer())
    alone = harvest(whole, rows_of_ids(), values, tmp_path / "alone", progress=False, **OPTIONS)
    store = Store(tmp_path / "s")
    for path in store.paths:
        assert store[path].shape == alone[path].shape, path
        found, wanted = in_order(store, path), in_order(alone, path)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
