"""What cannot be harvested is refused before the first forward, in the user's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gemloupe
from gemloupe import harvest
from gemloupe.errors import BadArgument, LoadError, Unavailable, UnknownName
from gemloupe.harvesting import work
from gemloupe.testing import tiny, tiny_module
from tests.core.models import Case
from tests.harvesting.data import OUTPUT, files, forwards, model, rows_of_ids

PATTERN = "layers[4].self_attn.attention_probabilities"


def long(ids: int) -> list[list[int]]:
    return [[2, 30], [2] + [40] * (ids - 1)]


REFUSED: list[tuple[str, Any, Any, dict[str, Any], type[Exception], list[str]]] = [
    ("nothing", [], OUTPUT, {}, BadArgument, ["holds no sequence", "list"]),
    ("an empty generator", (x for x in ()), OUTPUT, {}, BadArgument, ["holds no sequence"]),
    ("one text", "opal", OUTPUT, {}, BadArgument, ["'opal' is one text", "[text]", "Path('opal')"]),
    ("a number", 7, OUTPUT, {}, BadArgument, ["a list, an iterable, a Path or a data set, not 7"]),
    ("no file", Path("nowhere.txt"), OUTPUT, {}, BadArgument, ["no file nowhere.txt"]),
    ("an empty sequence", [[2, 30], []], OUTPUT, {}, BadArgument, ["sequence 1 is empty"]),
    ("no ids", [[2, 30], [0.5]], OUTPUT, {}, BadArgument, ["sequence 1 is no text and no list of token ids"]),
    ("nested", [[[2, 30]]], OUTPUT, {}, BadArgument, ["sequence 0 is no text and no list of token ids"]),
    ("an object", [object()], OUTPUT, {}, BadArgument, ["sequence 0 is no text", "object"]),
    ("an id too large", [[2, 288]], OUTPUT, {}, BadArgument, ["token id 288", "0 to 287"]),
    ("an id below zero", [[2, -1]], OUTPUT, {}, BadArgument, ["token id -1"]),
    (
        "a long sequence",
        long(513),
        OUTPUT,
        {},
        BadArgument,
        ["sequence 1 has 513 tokens", "limit is 512", "truncate=512"],
    ),
    ("no column", [{"body": "x"}], OUTPUT, {}, BadArgument, ["row 0 has no 'text'", "'body'", "column="]),
    ("no such column", [{"text": "x"}], OUTPUT, {"column": "t"}, BadArgument, ["no 't'", "'text'"]),
    ("no such value", [[2]], "layers[3].layer_outptu", {}, UnknownName, ["layer_output"]),
    ("an absent value", [[2]], "layers[9].self_attn.own_keys", {}, Unavailable, ["layers[9]", "borrows"]),
    ("no value", [[2]], [], {}, BadArgument, ["no value was asked for"]),
    ("a value that is none", [[2]], [3], {}, BadArgument, ["values are paths", "not 3"]),
    ("a module", [[2]], [tiny_module("e2b")], {}, BadArgument, ["not Gemma4ForCausalLM( (model): ", "...."]),
    ("next token", [[2]], "next_token_probs", {}, BadArgument, ["one row per sequence", "positions='last'"]),
    ("no such position", [[2]], OUTPUT, {"positions": "first"}, BadArgument, ["'first'", "'content'"]),
    ("no position", [[2]], OUTPUT, {"positions": "content"}, BadArgument, ["'content'", "choose no token"]),
    (
        "no mask",
        [[2, 30]],
        OUTPUT,
        {"positions": lambda ids: ids},
        BadArgument,
        ["torch.int64 (2,) for sequence 0", "torch.bool (2,) [seq]"],
    ),
    ("sample", [[2]], OUTPUT, {"sample": 0}, BadArgument, ["sample is a number of tokens", "not 0"]),
    ("seed", [[2]], OUTPUT, {"seed": "x"}, BadArgument, ["seed is a whole number, not 'x'"]),
    ("dtype", [[2]], OUTPUT, {"dtype": "brain"}, BadArgument, ["bfloat16", "not 'brain'"]),
    ("nothing chosen", [[2, 3]], OUTPUT, {"positions": lambda _: None}, BadArgument, ["positions gave None"]),
    ("int dtype", [[2]], OUTPUT, {"dtype": torch.int8}, BadArgument, ["one of float32", "torch.int8"]),
    ("budget", [[2]], OUTPUT, {"tokens_per_batch": 0}, BadArgument, ["tokens_per_batch", "not 0"]),
    ("shards", [[2]], OUTPUT, {"shard_bytes": 1.5}, BadArgument, ["shard_bytes", "not 1.5"]),
    ("truncate", [[2]], OUTPUT, {"truncate": 0}, BadArgument, ["truncate", "not 0"]),
    ("a typo", [[2]], OUTPUT, {"postions": "all"}, BadArgument, ["no option `postions`", "`positions`"]),
    ("an option of nothing", [[2]], OUTPUT, {"zzz": 1}, BadArgument, ["`zzz`", "positions, sample, seed"]),
]


@pytest.mark.parametrize(
    ("name", "given", "values", "options", "kind", "pieces"),
    REFUSED,
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_it_is_refused_before_anything_ran_or_was_written(
    name: str, given: Any, values: Any, options: Any, kind: type[Exception], pieces: list[str], tmp_path: Path
):
    of = model()
    with forwards(of) as ran, pytest.raises(kind) as error:
        harvest(of, given, values, tmp_path / "s", progress=False, **options)
    assert ran == []
    assert not (tmp_path / "s").exists()
    assert [piece for piece in pieces if piece not in str(error.value)] == [], str(error.value)


def test_a_sequence_as_long_as_the_limit_is_harvested(tmp_path: Path):
    assert len(harvest(model(), long(512), OUTPUT, tmp_path / "s", progress=False)) == 514


@pytest.mark.parametrize(
    "path", ["vision.tower_output", "vision.layers[0].layer_output", "vision.image_token_mask"]
)
def test_values_of_images_are_refused(path: str, tmp_path: Path):
    of = Case("e2b", wrapper=True).model()
    with pytest.raises(BadArgument, match="images, video or sound") as error:
        harvest(of, [[2, 30]], path, tmp_path / "s", progress=False)
    assert path in str(error.value)


def test_a_line_that_is_no_json_is_named(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"text": "opal"}\n\n{"text": \n')
    with pytest.raises(BadArgument, match=r"line 3 of .*in\.jsonl is no JSON"):
        harvest(model(), tmp_path / "in.jsonl", OUTPUT, tmp_path / "s", progress=False)


def test_text_without_a_tokenizer_and_a_model_that_is_none(tmp_path: Path):
    bare = tiny_module("e2b")
    with pytest.raises(LoadError, match="without a tokenizer"):
        harvest(gemloupe.StandardizedTransformer(bare), ["opal"], OUTPUT, tmp_path / "s", progress=False)
    with pytest.raises(BadArgument, match="StandardizedTransformer, not a Gemma4ForCausalLM; wrap it"):
        harvest(bare, ["opal"], OUTPUT, tmp_path / "s")  # pyright: ignore[reportArgumentType]


# ---- the directory -----------------------------------------------------------------------------------------


def other_weights() -> Any:
    return tiny("e2b", seed=77)


def other_shape() -> Any:
    return Case("e4b").model()


@pytest.mark.parametrize(
    ("changed", "pieces"),
    [
        ({"of": other_weights}, ["another model's store", "its model has other weights"]),
        ({"of": other_shape}, ["another model's store", "its model has another config"]),
        ({"given": [[2, 30, 31]]}, ["another harvest", "data sequences: 12 there, 1 in this call"]),
        (
            {"given": [*rows_of_ids()[:-1], [2, 99]]},
            ["another harvest", "its sequences or the tokens chosen of them are others"],
        ),
        (
            {"values": "layers[2].layer_output"},
            ["it has ['layers[3].layer_output'], which were not asked for", "no ['layers[2]"],
        ),
        ({"dtype": torch.float16}, ["options dtype: None there, 'float16' in this call"]),
        ({"positions": "last"}, ["options positions: 'all' there, 'last' in this call"]),
        ({"tokens_per_batch": 50}, ["options tokens_per_batch"]),
        ({"robust": True}, ["options robust"]),
    ],
)
def test_a_directory_that_holds_another_harvest(changed: Any, pieces: list[str], tmp_path: Path):
    harvest(model(), rows_of_ids(), OUTPUT, tmp_path, progress=False)
    before = files(tmp_path)
    call = {"of": model, "given": rows_of_ids(), "values": OUTPUT} | changed
    of, given, values = call.pop("of")(), call.pop("given"), call.pop("values")
    with forwards(of) as ran, pytest.raises(BadArgument) as error:
        harvest(of, given, values, tmp_path, progress=False, **call)
    assert ran == []
    assert files(tmp_path) == before
    pieces = [*pieces, str(tmp_path), "Give another directory"]
    assert [piece for piece in pieces if piece not in str(error.value)] == [], str(error.value)


def test_another_release_of_a_library_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    harvest(model(), rows_of_ids(), OUTPUT, tmp_path, progress=False)
    now = work.versions()
    monkeypatch.setattr(work, "versions", lambda: {**now, "torch": "9.9"})
    with pytest.raises(BadArgument, match=r"versions torch: '2\..* there, '9\.9' in this call"):
        harvest(model(), rows_of_ids(), OUTPUT, tmp_path, progress=False)


def test_a_complete_store_is_returned_and_one_batch_runs_to_compare(tmp_path: Path):
    of = model()
    harvest(of, rows_of_ids(), OUTPUT, tmp_path, progress=False)
    before = files(tmp_path)
    with forwards(of) as ran:
        store = harvest(of, rows_of_ids(), OUTPUT, tmp_path, progress=False)
    assert len(ran) == 1
    assert store.complete
    assert files(tmp_path) == before


def test_a_directory_with_other_files(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(BadArgument, match=r"not empty: it has thesis\.tex"):
        harvest(model(), rows_of_ids(), OUTPUT, tmp_path, progress=False)
    assert files(tmp_path) == {"thesis.tex": b"precious"}


def test_a_directory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    of = model()
    with forwards(of) as ran:
        with pytest.raises(BadArgument, match=r"file/s cannot be written.*Give another directory"):
            harvest(of, rows_of_ids(), OUTPUT, tmp_path / "file" / "s", progress=False)

        def refuse(*_: Any, **__: Any) -> Any:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", refuse)
        with pytest.raises(BadArgument, match=r"cannot be written: .*Permission denied"):
            harvest(of, rows_of_ids(), OUTPUT, tmp_path / "s", progress=False)
    assert ran == []


def test_what_is_no_store(tmp_path: Path):
    with pytest.raises(BadArgument, match=r"is no store: it has no index\.json"):
        gemloupe.Store(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps({"format": "gemloupe store 9"}))
    with pytest.raises(BadArgument, match="written as 'gemloupe store 9'"):
        gemloupe.Store(tmp_path)
