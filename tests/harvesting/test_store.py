"""Reading a store: slices, shuffled iteration, the torch data set, and other tools."""

from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy
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
        torch.tensor([7]),
        [7],
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


def test_rows_of_numpy_and_of_torch_are_taken_alike(store: Store):
    everything = whole(store, OUTPUT)
    for number in (numpy.int64(3), numpy.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.uint8)):
        assert torch.equal(store[OUTPUT][number], everything[3])
    for kind in ("int8", "int64", "uint16", "uint32", "uint64"):
        array = numpy.array([4, 60], dtype=kind)
        assert torch.equal(store[OUTPUT][array], everything[[4, 60]])
        assert torch.equal(store[OUTPUT][torch.from_numpy(array)], everything[[4, 60]])
    mask = store.positions == 0
    for same in (mask.numpy(), mask.tolist()):
        assert torch.equal(store[OUTPUT][same], everything[mask])
    assert torch.equal(store[OUTPUT][range(3)], everything[:3])
    assert torch.equal(store[OUTPUT][numpy.array([])], everything[:0])
    assert torch.equal(store[OUTPUT][torch.tensor(1) : torch.tensor(3)], everything[1:3])


NO_ROWS = {
    "a pair": ((3, 5), "(3, 5) names no rows"),
    "further axes": ((slice(0, 3), 5), "column[rows][:, 5]"),
    "a bool": (True, "True names no rows"),
    "a bool of numpy": (numpy.True_, "names no rows"),
    "a bool of torch": (torch.tensor(True), "torch.bool [] names no rows"),
    "a float": (1.0, "1.0 names no rows"),
    "floats": ([1.7], "[1.7] names no rows"),
    "a tensor of floats": (torch.tensor([1.0]), "torch.float32 [1] names no rows"),
    "a mask of bytes": (torch.ones(ROWS, dtype=torch.uint8), f"torch.uint8 [{ROWS}] names no rows"),
    "nothing": (None, "None names no rows"),
    "an ellipsis": (..., "Ellipsis names no rows"),
    "text": ("a", "'a' names no rows"),
    "numbers of two axes": ([[1, 2], [3, 4]], f"or a mask, torch.bool [{ROWS}]"),
    "a slice of floats": (slice(1.0, 3), "slice(1.0, 3, None) is no slice of rows"),
    "a step of zero": (slice(None, None, 0), "step cannot be zero"),
    "a mask of two axes": (
        torch.ones(ROWS, 2, dtype=torch.bool),
        f"a mask of rows is [{ROWS}], not [{ROWS}, 2]",
    ),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_what_names_no_rows_is_refused(store: Store, name: str):
    rows, message = NO_ROWS[name]
    with pytest.raises(BadArgument) as caught:
        store[OUTPUT][rows]
    assert message in str(caught.value)


@pytest.mark.parametrize("row", [ROWS, -ROWS - 1, [3, ROWS], 2**70], ids=str)
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
    assert not store[OUTPUT][start : start + 2].any()  # as the page says: clone first
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


@pytest.mark.parametrize(("size", "buffer"), [(10, 16), (1, 7), (1000, 8), (16, 4096), (7, 1)])
def test_shuffled_gives_every_row_once(store: Store, size: int, buffer: int):
    batches = list(store.shuffled(size, seed=3, buffer=buffer))
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
        batches = store.shuffled(9, OUTPUT, seed=seed, buffer=8)
        return [key for batch in batches for key in keys(batch)]

    assert order(1) == order(1)
    assert order(1) != order(2)
    first = [sorted(order(1)[:8]), sorted(order(2)[:8])]
    assert first[0] != first[1]  # not only inside the buffer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is a number of rows, not 0"),
        ({"batch_size": 2.0}, "batch_size is a number of rows, not 2.0"),
        ({"buffer": True}, "buffer is a number of rows, not True"),
        ({"seed": None}, "seed is a whole number of 64 bits, not None"),
        ({"seed": "x"}, "seed is a whole number of 64 bits, not 'x'"),
        ({"seed": 2**70}, f"seed is a whole number of 64 bits, not {2**70}"),
        ({"seed": -(2**63) - 1}, "seed is a whole number of 64 bits"),
    ],
    ids=["no rows", "a float", "a bool", "no seed", "text", "a large seed", "a low seed"],
)
def test_what_shuffled_refuses_it_refuses_at_once(store: Store, options: Any, message: str):
    with pytest.raises(BadArgument, match=f"shuffled: {re.escape(message)}"):
        store.shuffled(**{"batch_size": 4} | options)


def test_shuffled_takes_whole_numbers_of_numpy_and_every_seed_of_64_bits(store: Store):
    wanted = [keys(batch) for batch in store.shuffled(9, OUTPUT, seed=5, buffer=8)]
    five = numpy.int64(5)
    assert wanted == [keys(b) for b in store.shuffled(numpy.int32(9), OUTPUT, seed=five, buffer=five + 3)]
    for seed in (-(2**63), 2**64 - 1):
        assert sum(len(batch[OUTPUT]) for batch in store.shuffled(40, OUTPUT, seed=seed)) == ROWS


@pytest.mark.parametrize("kind", ["name", "number", "nothing", "module"])
def test_values_that_the_store_does_not_have_are_named_in_one_line(store: Store, kind: str):
    wrong: Any = {"name": "logits", "number": 7, "nothing": [None], "module": [model()._module]}[kind]
    for ask in (lambda: store.shuffled(4, wrong), lambda: store.dataset(wrong)):
        with pytest.raises(UnknownName, match="was not harvested") as caught:
            ask()
        assert len(str(caught.value)) < 150
        assert "\n" not in str(caught.value)


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
