"""Reading a store: slices, shuffled iteration, the torch data set, and other tools."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.utils.data import DataLoader

from gemloupe import Store, harvest
from gemloupe.errors import BadArgument, UnknownName
from tests.harvesting.data import LENGTHS, OUTPUT, model, rows_of_ids

OTHER = "layers[1].mlp.mlp_output"
ROWS = sum(LENGTHS)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    harvest(
        model(), rows_of_ids(), [OUTPUT, OTHER], folder, tokens_per_batch=15, shard_bytes=6000, progress=False
    )
    return folder


@pytest.fixture
def store(path: Path) -> Store:
    found = Store(path)
    assert len(found.shards) > 4  # slices cross shards
    return found


def whole(store: Store, name: str) -> torch.Tensor:
    """A column as safetensors alone reads it."""
    parts = []
    for record in json.loads((store.path / "index.json").read_text())["shards"]:
        with safe_open(store.path / "shards" / record["file"], "pt") as file:
            parts.append(file.get_tensor(name))
    return torch.cat(parts)


def test_any_tool_that_reads_safetensors_reads_it(store: Store):
    assert torch.equal(store[OUTPUT][:], whole(store, OUTPUT))
    for name in ("token_ids", "positions", "sequences"):
        assert torch.equal(getattr(store, name), whole(store, name))
    texts = rows_of_ids()
    for row in range(0, len(store), 7):
        token = texts[int(store.sequences[row])][int(store.positions[row])]
        assert int(store.token_ids[row]) == token


@pytest.mark.parametrize(
    "rows",
    [
        slice(None),
        slice(3, 5),
        slice(5, 60),
        slice(-7, None),
        slice(60, 2, -9),
        slice(1, 70, 13),
        slice(9, 9),
        slice(70, 3),
        0,
        -1,
        [4, 80, 4, -2],
        torch.tensor([7, 3]),
        [],
    ],
    ids=str,
)
def test_rows_are_taken_as_of_one_tensor(store: Store, rows: Any):
    everything = whole(store, OUTPUT)
    wanted = everything[list(range(ROWS))[rows]] if isinstance(rows, slice) else everything[rows]
    found = store[OUTPUT][rows]
    assert found.shape == wanted.shape
    assert torch.equal(found, wanted)
    assert found.dtype == torch.float32


def test_a_mask_of_rows(store: Store):
    mask = store.positions == 0
    assert torch.equal(store[OUTPUT][mask], whole(store, OUTPUT)[mask])
    assert len(store[OUTPUT][mask]) == len(LENGTHS)
    with pytest.raises(BadArgument, match=rf"a mask of rows is \[{ROWS}\], not \[3\]"):
        store[OUTPUT][torch.tensor([True, False, True])]


@pytest.mark.parametrize("row", [ROWS, -ROWS - 1, [3, ROWS]])
def test_a_row_past_the_end(store: Store, row: Any):
    with pytest.raises(IndexError, match=f"is past the store's {ROWS}, 0 to {ROWS - 1}"):
        store[OUTPUT][row]


def test_a_slice_inside_a_shard_is_a_view_of_the_file(store: Store):
    record = store.shards[1]
    start = store.shards[0].rows
    one, other = store[OUTPUT][start : start + 2], store[OUTPUT][start : start + record.rows]
    assert one.data_ptr() == other.data_ptr()
    before = whole(store, OUTPUT)
    one.zero_()  # the file is not written
    assert torch.equal(whole(store, OUTPUT), before)
    assert torch.equal(Store(store.path)[OUTPUT][:], before)


def test_what_there_is(store: Store):
    assert store.paths == (OTHER, OUTPUT)
    assert store.complete
    assert len(store) == ROWS
    assert store[OUTPUT].shape == (ROWS, 40)
    assert store[OUTPUT].axes == ("rows", "hidden")
    assert OUTPUT in store
    assert "layers[9].layer_output" not in store
    assert repr(store[OUTPUT]) == f"<{OUTPUT} [rows hidden]: {ROWS} rows>"
    assert repr(store) == f"Store('{store.path}': {ROWS} rows of 2 values of Gemma4ForCausalLM)"
    with pytest.raises(UnknownName, match=r"layers\[4\]\.layer_output was not harvested") as error:
        store["layers[4].layer_output"]
    assert f"Did you mean {OUTPUT}?" in str(error.value)
    assert torch.equal(store[model().layers[3].layer_output][:], store[OUTPUT][:])


def test_the_rows_of_a_sequence(store: Store):
    for sequence, length in enumerate(LENGTHS):
        rows = store.of_sequence(sequence)
        assert store.positions[rows].tolist() == list(range(length))
        assert set(store.sequences[rows].tolist()) == {sequence}
    for number in (len(LENGTHS), -1):
        with pytest.raises(
            BadArgument, match=rf"no sequence {number}: the data set has {len(LENGTHS)}, numbered"
        ):
            store.of_sequence(number)


def test_a_sequence_none_of_whose_tokens_was_chosen_has_no_rows(tmp_path: Path):
    found = harvest(
        model(),
        rows_of_ids(),
        OUTPUT,
        tmp_path / "s",
        positions=lambda ids: torch.full(ids.shape, len(ids) != 3),
        progress=False,
    )
    empty = LENGTHS.index(3)
    assert found.of_sequence(empty) == slice(0, 0)
    assert len(found[OUTPUT][found.of_sequence(empty)]) == 0
    assert set(found.sequences[found.of_sequence(empty + 1)].tolist()) == {empty + 1}


# ---- iteration ---------------------------------------------------------------------------------------------


def keys(batch: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    return list(zip(batch["sequences"].tolist(), batch["positions"].tolist(), strict=True))


@pytest.mark.parametrize(("size", "block"), [(10, 16), (1, 7), (1000, 8), (16, 4096), (7, 1)])
def test_shuffled_gives_every_row_once(store: Store, size: int, block: int):
    batches = list(store.shuffled(size, seed=3, block=block))
    assert [len(batch[OUTPUT]) for batch in batches[:-1]] == [size] * (len(batches) - 1)
    assert 0 < len(batches[-1][OUTPUT]) <= size
    found = [key for batch in batches for key in keys(batch)]
    stored = list(zip(store.sequences.tolist(), store.positions.tolist(), strict=True))
    assert sorted(found) == sorted(stored)
    assert found != stored
    rows = dict(zip(stored, store[OUTPUT][:], strict=True))
    for batch in batches:
        assert batch.keys() == {OUTPUT, OTHER, "token_ids", "positions", "sequences"}
        for key, row in zip(keys(batch), batch[OUTPUT], strict=True):
            assert torch.equal(row, rows[key])


def test_the_order_is_the_seeds(store: Store):
    def order(seed: int) -> list[tuple[int, int]]:
        batches = store.shuffled(9, OUTPUT, seed=seed, block=8)
        return [key for batch in batches for key in keys(batch)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    blocks = [sorted(order(1)[:8]), sorted(order(2)[:8])]
    assert blocks[0] != blocks[1]  # not only inside the blocks


@pytest.mark.parametrize(("options", "name"), [({"batch_size": 0}, "batch_size"), ({"block": True}, "block")])
def test_what_shuffled_refuses_it_refuses_at_once(store: Store, options: Any, name: str):
    with pytest.raises(BadArgument, match=f"shuffled: {name} is a number of rows"):
        store.shuffled(**{"batch_size": 4} | options)
    with pytest.raises(UnknownName):
        store.shuffled(4, "logits")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_torch_data_set(store: Store, workers: int):
    rows = store.dataset(OUTPUT)
    assert len(rows) == ROWS
    assert torch.equal(rows[5][OUTPUT], store[OUTPUT][5])
    loader = DataLoader(rows, batch_size=20, shuffle=True, num_workers=workers)
    batches = list(loader)
    assert [len(batch[OUTPUT]) for batch in batches] == [20] * (ROWS // 20) + [ROWS % 20]
    found = {key: row for batch in batches for key, row in zip(keys(batch), batch[OUTPUT], strict=True)}
    for i in range(ROWS):
        assert torch.equal(found[int(store.sequences[i]), int(store.positions[i])], store[OUTPUT][i])


def test_a_store_travels_to_another_process_without_its_files(store: Store):
    _ = store[OUTPUT][:]
    sent = pickle.dumps(store)
    assert len(sent) < 30_000
    assert torch.equal(pickle.loads(sent)[OUTPUT][3:50], store[OUTPUT][3:50])
    assert torch.equal(copy.copy(store)[OUTPUT][0], store[OUTPUT][0])
