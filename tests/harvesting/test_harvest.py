"""`harvest`: which rows of which values a store holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import gemloupe
from gemloupe import harvest
from gemloupe.errors import PromptWarning
from gemloupe.testing import SHAPES, save_tiny
from tests.core.models import Case, padded
from tests.harvesting.data import (
    LENGTHS,
    OUTPUT,
    OUTPUTS,
    counted,
    forwards,
    in_order,
    model,
    rows_of_ids,
)

SPECIAL = {0, 1, 2, 3}


# ---- every value -------------------------------------------------------------------------------------------


def harvestable(of: Any) -> list[str]:
    """Every value that has rows, from what the model says it has."""
    return [
        path
        for row in of.support()
        if row.available and row.layout.axes[0] == "batch" and not row.path.startswith(("vision", "audio"))
        for path in (
            [row.path] if row.blocks is None else [row.path.replace("[i]", f"[{i}]") for i in row.blocks]
        )
    ]


def row_by_hand(path: str, axes: tuple[str, ...], value: Tensor, position: int, keys: int) -> Tensor:
    """A token's row of a value of one text without padding, `[1 ...]`, written from the documentation."""
    if axes == ("batch", "vocab"):
        return value[0]
    token = axes.index(next(axis for axis in ("seq", "query", "key") if axis in axes))
    row = value[0].select(token - 1, position)
    if "query" in axes and "key" in axes:
        filler = -torch.inf if path.endswith("scores") else 0
        row = torch.cat([row, row.new_full((row.shape[0], keys - row.shape[1]), filler)], 1)
    return row


@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_that_the_model_has_is_what_collect_reads(shape: str, tmp_path: Path):
    of = Case(shape, wrapper=shape == "12b", experts="batched_mm" if shape == "26b-a4b" else None).model()
    every = harvestable(of)
    assert {"attention_scores", "attention_keys", "own_keys"} <= {path.rpartition(".")[2] for path in every}
    texts = [row for row in rows_of_ids() if len(row) in (1, 5, 14)]
    paths = [path for path in every if path != "next_token_probs"]
    store = harvest(of, texts, paths, tmp_path / "all", tokens_per_batch=1, progress=False)
    last = harvest(of, texts, every, tmp_path / "last", positions="last", tokens_per_batch=1, progress=False)
    assert sorted(store.paths) == sorted(paths)
    assert (len(store), len(last)) == (20, 3)
    for sequence, ids in enumerate(texts):
        alone = of.collect(torch.tensor([ids]), every)
        for path in every:
            layout = (last.index.values[path]["layout"], store.index.values.get(path))
            axes = tuple(layout[0])
            wanted = [row_by_hand(path, axes, alone[path], at, 14) for at in range(len(ids))]
            if path in paths:
                rows = store[path][store.of_sequence(sequence)]
                assert torch.equal(rows, torch.stack(wanted)), path
                assert rows.dtype == alone[path].dtype
                assert store[path].axes[0] == "rows"
                assert len(store[path].axes) == rows.dim()
            assert torch.equal(last[path][last.of_sequence(sequence)][0], wanted[-1]), path


def test_rows_of_padded_batches_are_those_of_plain_hooks(tmp_path: Path):
    case = Case("e2b")
    texts = rows_of_ids()
    with forwards(case.model()) as ran:
        store = harvest(case.model(), texts, OUTPUTS, tmp_path / "s", tokens_per_batch=30, progress=False)
    assert any(bool((batch == 0).any()) for batch in ran)  # padding was in play
    order = list(dict.fromkeys(store.sequences.tolist()))
    kept: list[Tensor] = []
    handle = case.bare().model.layers[3].register_forward_hook(lambda _m, _a, output: kept.append(output))
    at = 0
    try:
        for batch in ran:
            some = order[at : at + len(batch)]
            at += len(batch)
            with torch.no_grad():
                case.bare()(**padded([torch.tensor([texts[i]]) for i in some]))
            for row, sequence in enumerate(some):
                wanted = kept[-1][row, -len(texts[sequence]) :]
                assert torch.equal(store[OUTPUT][store.of_sequence(sequence)], wanted)
    finally:
        handle.remove()
    assert at == len(texts)


def test_keys_of_a_pattern_are_by_their_place_in_the_text_whatever_the_padding(tmp_path: Path):
    of, path = model(), "layers[4].self_attn.attention_probabilities"
    store = harvest(of, rows_of_ids(), path, tmp_path / "s", tokens_per_batch=1000, progress=False)
    assert store[path].axes == ("rows", "heads", "key")
    assert store[path].shape == (sum(LENGTHS), 4, 14)
    for sequence, ids in enumerate(rows_of_ids()):
        alone = of.collect(torch.tensor([ids]), path)[path][0]
        rows = store[path][store.of_sequence(sequence)]
        torch.testing.assert_close(rows[..., : len(ids)], alone.movedim(0, 1))
        assert not rows[..., len(ids) :].any()


# ---- which tokens, as what ---------------------------------------------------------------------------------


def places(store: gemloupe.Store) -> list[tuple[int, int]]:
    return sorted(zip(store.sequences.tolist(), store.positions.tolist(), strict=True))


def of_all() -> list[tuple[int, int]]:
    return [(sequence, at) for sequence, length in enumerate(LENGTHS) for at in range(length)]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, of_all()),
        ({"positions": "last"}, [(sequence, length - 1) for sequence, length in enumerate(LENGTHS)]),
        ({"positions": "content"}, [place for place in of_all() if place[1]]),  # all but BOS
        ({"positions": lambda ids: torch.arange(len(ids)) % 3 == 1}, [p for p in of_all() if p[1] % 3 == 1]),
        ({"truncate": 4}, [place for place in of_all() if place[1] < 4]),
        ({"sample": 100}, of_all()),
    ],
    ids=["all", "last", "content", "function", "truncate", "large sample"],
)
def test_which_tokens_get_a_row(options: Any, wanted: list[tuple[int, int]], tmp_path: Path):
    texts = rows_of_ids()
    whole = harvest(model(), texts, OUTPUT, tmp_path / "all", tokens_per_batch=1, progress=False)
    store = harvest(model(), texts, OUTPUT, tmp_path / "s", tokens_per_batch=1, progress=False, **options)
    assert places(store) == wanted
    for i, (sequence, at) in enumerate(zip(store.sequences.tolist(), store.positions.tolist(), strict=True)):
        assert int(store.token_ids[i]) == texts[sequence][at]
        assert torch.allclose(store[OUTPUT][i], whole[OUTPUT][whole.of_sequence(sequence)][at], atol=1e-5)
    assert (store.token_ids.dtype, store.positions.dtype) == (torch.int32, torch.int32)
    assert store.sequences.dtype == torch.int64


def test_content_leaves_out_every_special_token(tmp_path: Path):
    of = model()
    texts = [[2, 30, 4, 5, 31, 1, 32, 0]]
    assert {0, 1, 2, 4, 5} <= set(of.tokenizer.all_special_ids)
    store = harvest(of, texts, OUTPUT, tmp_path / "s", positions="content", progress=False)
    assert store.token_ids.tolist() == [30, 31, 32]


def test_a_sample_is_drawn_per_sequence_by_the_seed_alone(tmp_path: Path):
    def drawn(name: str, **options: Any) -> list[tuple[int, int]]:
        store = harvest(
            model(), rows_of_ids(), "input_ids", tmp_path / name, sample=3, progress=False, **options
        )
        return places(store)

    one = drawn("one", seed=1)
    counts = [sum(sequence == at for sequence, _ in one) for at in range(len(LENGTHS))]
    assert counts == [min(3, length) for length in LENGTHS]
    of_nine = [tuple(at for sequence, at in one if sequence == nine) for nine in (0, 4, 8)]
    assert len(set(of_nine)) > 1  # each sequence has a draw of its own
    assert drawn("batches", seed=1, tokens_per_batch=7) == one
    assert drawn("two", seed=2) != one
    content = drawn("content", seed=1, positions="content")
    assert all(at > 0 for _, at in content)
    assert len(content) == sum(min(3, length - 1) for length in LENGTHS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_what_numbers_are_stored_as(dtype: torch.dtype, tmp_path: Path):
    plain = harvest(model(), rows_of_ids(), [OUTPUT, "input_ids"], tmp_path / "plain", progress=False)
    store = harvest(
        model(), rows_of_ids(), [OUTPUT, "input_ids"], tmp_path / "s", dtype=dtype, progress=False
    )
    assert store[OUTPUT].dtype == dtype
    assert torch.equal(store[OUTPUT][:], plain[OUTPUT][:].to(dtype))
    assert store["input_ids"].dtype == torch.int64


def test_the_forward_stops_after_the_last_value_and_sequences_without_rows_are_not_run(tmp_path: Path):
    of = model()
    with counted(of.layers[3]._module) as third, counted(of.layers[4]._module) as fourth:
        harvest(of, rows_of_ids(), OUTPUT, tmp_path / "s", tokens_per_batch=30, progress=False)
    assert len(third) > 1
    assert fourth == []
    with forwards(of) as ran:
        harvest(
            of,
            rows_of_ids(),
            OUTPUT,
            tmp_path / "few",
            tokens_per_batch=1,
            positions=lambda ids: torch.full(ids.shape, len(ids) == 9),
            progress=False,
        )
    assert [batch.shape for batch in ran] == [(1, 9)] * LENGTHS.count(9)


def test_values_come_by_pattern_and_reference_in_forward_order(tmp_path: Path):
    of = model()
    asked = ["layers[5:7].layer_output", of.layers[2].mlp.mlp_output, "layers[5].layer_output"]
    store = harvest(of, rows_of_ids(), asked, tmp_path / "s", progress=False)
    assert store.paths == ("layers[2].mlp.mlp_output", "layers[5].layer_output", "layers[6].layer_output")
    assert [facts["block"] for facts in store.index.values.values()] == [2, 5, 6]


def test_harvest_leaves_the_model_and_the_threads_as_they_were(tmp_path: Path):
    of, ids = model(), torch.tensor([rows_of_ids()[0]])
    with torch.no_grad():
        before = of._module(ids).logits
    harvest(of, rows_of_ids(), OUTPUTS, tmp_path / "s", progress=False)
    with torch.no_grad():
        assert torch.equal(of._module(ids).logits, before)
    assert torch.is_grad_enabled()


# ---- from what ---------------------------------------------------------------------------------------------

TEXTS = ["opal", "a longer jade", "agate"]


def as_file(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def sources(folder: Path, tokenizer: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    ids = tokenizer(TEXTS)["input_ids"]
    encoding = tokenizer(TEXTS, padding=True, return_tensors="pt")
    jsonl = [json.dumps(text) for text in TEXTS[:1]] + [json.dumps({"text": text}) for text in TEXTS[1:]]
    return {
        "texts": (TEXTS, {}),
        "a generator": ((text for text in TEXTS), {}),
        "ids": (ids, {}),
        "tensors": ([torch.tensor(row) for row in ids], {}),
        "mixed": ([TEXTS[0], ids[1], torch.tensor(ids[2])], {}),
        "an encoding": (encoding, {}),
        "rows": ([{"text": text, "n": 1} for text in TEXTS], {}),
        "rows of ids": ([{"input_ids": row, "text": "no"} for row in ids], {}),
        "a column": ([{"body": text, "text": "no"} for text in TEXTS], {"column": "body"}),
        "a text file": (as_file(folder / "in.txt", [TEXTS[0], "", *TEXTS[1:]]), {}),
        "JSONL": (as_file(folder / "in.jsonl", jsonl), {}),
        "JSONL, a column": (
            as_file(folder / "column.jsonl", [json.dumps({"body": text}) for text in TEXTS]),
            {"column": "body"},
        ),
    }


def test_what_is_given_may_be_texts_ids_rows_or_a_file(tmp_path: Path):
    of = model()
    wanted = harvest(of, TEXTS, OUTPUT, tmp_path / "wanted", progress=False)
    for name, (given, options) in sources(tmp_path, of.tokenizer).items():
        store = harvest(of, given, OUTPUT, tmp_path / name, progress=False, **options)
        for path in (OUTPUT, "token_ids", "sequences", "positions"):
            assert torch.equal(store[path][:], wanted[path][:]), name
    batch = torch.tensor([[2, 30, 31], [2, 40, 41]])
    store = harvest(of, batch, "input_ids", tmp_path / "a batch", progress=False)
    assert in_order(store, "input_ids").tolist() == batch.flatten().tolist()


def test_a_hugging_face_data_set(tmp_path: Path):
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    file = as_file(tmp_path / "in.jsonl", [json.dumps({"text": text}) for text in TEXTS])
    wanted = harvest(model(), TEXTS, OUTPUT, tmp_path / "wanted", progress=False)
    for streaming in (False, True):
        rows = datasets.load_dataset(
            "json", data_files=str(file), split="train", cache_dir=str(tmp_path), streaming=streaming
        )
        store = harvest(model(), rows, OUTPUT, tmp_path / f"s{streaming}", progress=False)
        assert torch.equal(store[OUTPUT][:], wanted[OUTPUT][:])


def test_sequences_without_bos_are_told_of_once(tmp_path: Path):
    texts = [row[1:] if len(row) > 5 else row for row in rows_of_ids()]
    with pytest.warns(PromptWarning, match=r"7 of 12 sequences, the first of them 0, do not begin") as told:
        harvest(model(), texts, OUTPUT, tmp_path / "s", tokens_per_batch=10, progress=False)
    assert len(told) == 1
    assert told[0].filename == __file__


@pytest.mark.parametrize("kind", [torch.zeros, numpy.zeros], ids=["torch", "numpy"])
def test_a_function_of_positions_may_give_one_buffer_again_and_again(kind: Any, tmp_path: Path):
    buffer = kind(5, dtype=torch.bool if kind is torch.zeros else bool)

    def chosen(ids: torch.Tensor) -> Any:
        buffer[:] = False
        buffer[int(ids[1]) // 10] = True
        return buffer

    texts = [[2, 10, 11, 12, 13], [2, 20, 21, 22, 23], [2, 30, 31, 32, 33]]
    store = harvest(model(), texts, OUTPUT, tmp_path / "s", positions=chosen, progress=False)
    assert store.positions[store.sequences.argsort()].tolist() == [1, 2, 3]


def test_numbers_of_numpy(tmp_path: Path):
    plain: Any = {"sample": 2, "seed": 3, "tokens_per_batch": 20, "shard_bytes": 9000, "truncate": 5}
    wanted = harvest(model(), rows_of_ids(), OUTPUT, tmp_path / "a", progress=False, **plain)
    others: Any = {name: numpy.int64(number) for name, number in plain.items()}
    store = harvest(model(), rows_of_ids(), OUTPUT, tmp_path / "b", progress=False, **others)
    assert store.index == wanted.index


def test_a_second_bos_is_told_of_once(tmp_path: Path):
    texts = [[2, *row] if len(row) > 5 else row for row in rows_of_ids()]
    with pytest.warns(
        PromptWarning, match=r"7 of 12 sequences, the first of them 0, begin with .* twice"
    ) as told:
        harvest(model(), texts, OUTPUT, tmp_path / "s", tokens_per_batch=10, progress=False)
    assert len(told) == 1
    assert told[0].filename == __file__


def test_the_index_says_what_the_store_is(tmp_path: Path):
    save_tiny(tmp_path / "tiny", "31b")
    of = gemloupe.StandardizedTransformer(tmp_path / "tiny")
    options: dict[str, Any] = {"positions": "content", "sample": 2, "seed": 5, "dtype": torch.bfloat16}
    harvest(of, rows_of_ids(), OUTPUT, tmp_path / "s", progress=False, **options)
    index = json.loads((tmp_path / "s" / "index.json").read_text())
    assert index["complete"] is True
    assert index["model"]["name"] == str(tmp_path / "tiny")
    assert index["model"]["class"] == "Gemma4ForCausalLM"
    assert {"revision", "config", "weights", "model_type"} <= index["model"].keys()
    assert index["values"] == {
        OUTPUT: {
            "layout": ["batch", "seq", "hidden"],
            "axes": ["hidden"],
            "block": 3,
            "dtype": "bfloat16",
            "shape": [40],
        }
    }
    rows = sum(min(2, length - 1) for length in LENGTHS)
    assert index["data"].pop("checksum")
    assert index["data"] == {"sequences": 12, "tokens": sum(LENGTHS), "rows": rows, "longest": 14}
    assert index["options"]["dtype"] == "bfloat16"
    assert (index["options"]["sample"], index["options"]["seed"]) == (2, 5)
    assert index["versions"].keys() >= {"python", "gemloupe", "torch", "transformers", "nnsight"}
    assert [shard["rows"] for shard in index["shards"]] == [rows]


def test_a_model_on_several_devices_as_accelerate_puts_it(tmp_path: Path):
    save_tiny(tmp_path / "tiny", "e2b")
    spread = gemloupe.StandardizedTransformer(tmp_path / "tiny", device_map="auto")
    plain = gemloupe.StandardizedTransformer(tmp_path / "tiny")
    one = harvest(spread, rows_of_ids(), OUTPUTS, tmp_path / "one", progress=False)
    other = harvest(plain, rows_of_ids(), OUTPUTS, tmp_path / "other", progress=False)
    for path in one.paths:
        assert torch.equal(one[path][:], other[path][:])
