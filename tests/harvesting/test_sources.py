"""What sequences come from: encodings and rows with their masks, arrays of any kind, files of any make."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gemloupe import harvest
from gemloupe.errors import BadArgument
from gemloupe.harvesting.sequences import read
from tests.core.models import Case
from tests.harvesting.data import OUTPUT, forwards, model

OPAL = [2, *[byte + 20 for byte in range(10, 15)]]
JADE = [2, 77]


def tokens(given: Any, **options: Any) -> list[list[int]]:
    """The ids of every sequence."""
    found = read(model(), given, **options)
    return [found[at].tolist() for at in range(len(found))]


def refusal(given: Any, **options: Any) -> str:
    with pytest.raises(BadArgument) as caught:
        read(model(), given, **options)
    return str(caught.value)


# ---- masks -------------------------------------------------------------------------------------------------

PADDED = {
    "left": ([[0, 0, *OPAL], [0, 0, 0, 0, 0, 0, *JADE]], [[0] * 2 + [1] * 6, [0] * 6 + [1] * 2]),
    "right": ([[*OPAL, 0, 0], [*JADE, 0, 0, 0, 0, 0, 0]], [[1] * 6 + [0] * 2, [1] * 2 + [0] * 6]),
    "both": ([[0, *OPAL, 0], [0, *JADE, 0, 0, 0, 0, 0]], [[0] + [1] * 6 + [0], [0] + [1] * 2 + [0] * 5]),
}


@pytest.mark.parametrize("side", PADDED)
@pytest.mark.parametrize("kind", ["lists", "tensors", "arrays", "bools"])
def test_padding_is_left_out_of_encodings_and_of_rows(side: str, kind: str):
    ids, masks = PADDED[side]
    make: dict[str, Any] = {
        "lists": (list, list),
        "tensors": (torch.tensor, torch.tensor),
        "arrays": (numpy.array, numpy.array),
        "bools": (torch.tensor, lambda mask: torch.tensor(mask).bool()),
    }
    of_ids, of_mask = make[kind]
    encoding = {"input_ids": of_ids(ids), "attention_mask": of_mask(masks)}
    assert tokens(encoding) == [OPAL, JADE]
    rows = [
        {"input_ids": of_ids(row), "attention_mask": of_mask(mask)}
        for row, mask in zip(ids, masks, strict=True)
    ]
    assert tokens(rows) == [OPAL, JADE]
    assert tokens(rows, truncate=3) == [OPAL[:3], JADE]


def test_a_padded_row_is_harvested_as_its_text_is(tmp_path: Path):
    of = model()
    encoded = of.tokenizer(["opal", "a longer jade"], padding="max_length", max_length=16)
    rows = [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]
    assert 0 in rows[1]["attention_mask"]
    one = harvest(of, ["opal", "a longer jade"], OUTPUT, tmp_path / "one", progress=False)
    other = harvest(of, rows, OUTPUT, tmp_path / "other", progress=False)
    for name in (OUTPUT, "token_ids", "positions", "sequences"):
        assert torch.equal(one[name][:], other[name][:])


def test_the_mask_is_of_the_ids_and_of_a_field_that_stands_in_for_them():
    mask = [0, 1, 1]
    assert tokens([{"ids": [0, *JADE], "attention_mask": mask}], column="ids") == [JADE]
    row = {"input_ids": [9, 9, 9], "attention_mask": mask, "ids": OPAL, "text": "a"}
    assert tokens([row], column="ids") == [OPAL]
    assert tokens([row], column="text") == tokens(["a"])
    assert tokens([{"input_ids": JADE, "attention_mask": None}]) == [JADE]


def test_ids_alone_are_all_tokens():
    batch = torch.tensor([[0, 2, 40], [2, 41, 0]])
    assert tokens(batch) == tokens({"input_ids": batch}) == batch.tolist()


@pytest.mark.parametrize("kind", ["list", "tensor", "array", "tokenizer"])
def test_an_encoding_of_one_text_is_one_sequence(kind: str):
    make: dict[str, Any] = {"list": list, "tensor": torch.tensor, "array": numpy.array}
    if kind == "tokenizer":
        encoding = model().tokenizer("opal")
        assert tokens(encoding) == [encoding["input_ids"]] == tokens(["opal"])
        return
    assert tokens({"input_ids": make[kind](OPAL)}) == [OPAL]
    masked = {"input_ids": make[kind]([0, *OPAL]), "attention_mask": make[kind]([0] + [1] * 6)}
    assert tokens(masked) == [OPAL]


@pytest.mark.parametrize(
    ("given", "pieces"),
    [
        ([{"input_ids": JADE, "attention_mask": [1]}], ["sequence 0 has 2 token ids", "not [1]"]),
        ([{"input_ids": JADE, "attention_mask": [0.5, 1]}], ["1 for a token and 0 for padding"]),
        ([{"input_ids": JADE, "attention_mask": ["a", "b"]}], ["not ['a', 'b']"]),
        (
            [JADE, {"input_ids": OPAL, "attention_mask": [0, 1, 1, 0, 1, 0]}],
            ["sequence 1 hides token 3", "at the ends alone"],
        ),
        ({"input_ids": [OPAL], "attention_mask": [[1, 0, 1, 1, 1, 1]]}, ["sequence 0 hides token 1"]),
        ([{"input_ids": JADE, "attention_mask": [0, 0]}], ["sequence 0 is empty"]),
        ({"input_ids": [JADE, JADE], "attention_mask": [[1, 1]]}, ["2 sequences", "not as many rows"]),
        ({"input_ids": [JADE], "attention_mask": 1}, ["1 sequences", "not as many rows: 1"]),
        ({"input_ids": "opal"}, ["`input_ids` are no list of token ids: 'opal'"]),
        ({"input_ids": torch.tensor(3)}, ["`input_ids` are no list of token ids: tensor(3)"]),
        ({"ids": [JADE]}, ["an encoding has `input_ids`; this one has ids"]),
    ],
    ids=[
        "another length",
        "halves",
        "words",
        "a hole in a row",
        "a hole in an encoding",
        "all padding",
        "too few rows",
        "a number",
        "text for ids",
        "an id for ids",
        "no ids",
    ],
)
def test_a_mask_that_does_not_fit_is_refused(given: Any, pieces: list[str]):
    said = refusal(given)
    assert [piece for piece in pieces if piece not in said] == [], said


# ---- ids ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"])
def test_ids_may_be_whole_numbers_of_any_kind(name: str):
    array = numpy.array([2, 30, 31], dtype=name)
    tensor = torch.tensor([2, 30, 31]).to(getattr(torch, name))
    assert tokens([array]) == tokens([tensor]) == tokens(array[None]) == [[2, 30, 31]]
    mask = torch.tensor([0, 1, 1]).to(tensor.dtype)
    assert tokens({"input_ids": tensor[None], "attention_mask": mask[None]}) == [[30, 31]]


@pytest.mark.parametrize("kind", ["array", "tensor", "row"])
def test_a_buffer_that_is_given_again_and_again_is_copied(kind: str):
    def buffers() -> Iterator[Any]:
        buffer: Any = numpy.zeros(2, dtype="int32") if kind == "array" else torch.zeros(2, dtype=torch.int32)
        for token in (30, 31, 32):
            buffer[0], buffer[1] = 2, token
            yield {"input_ids": buffer} if kind == "row" else buffer

    assert tokens(buffers()) == [[2, 30], [2, 31], [2, 32]]


def fake() -> Any:
    with FakeTensorMode():
        return torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "pieces"),
    [
        ([JADE, torch.zeros(3, dtype=torch.int64, device="meta")], ["sequence 1", "without data (meta)"]),
        ([fake()], ["sequence 0", "without data"]),
        (JADE, ["sequence 0", "2. One sequence is given as [ids]"]),
        ([torch.tensor([1j])], ["no list of token ids"]),
        (["opal", "a\ud800b"], ["sequence 1 is no text", r"character 1 is '\ud800'", "surrogate pair"]),
    ],
    ids=["meta", "fake", "one list", "complex", "a surrogate"],
)
def test_what_is_neither_text_nor_ids(given: Any, pieces: list[str]):
    said = refusal(given)
    assert [piece for piece in pieces if piece not in said] == [], said


# ---- placeholders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "noun"), [("image", "image"), ("video", "video frame"), ("audio", "audio")], ids=str
)
def test_placeholders_are_refused_before_the_first_forward(kind: str, noun: str, tmp_path: Path):
    of = Case("e2b", wrapper=True).model()
    token = getattr(of._module.config, f"{kind}_token_id")
    text = of.tokenizer.decode([token])
    texts = ["opal", "jade", f"ab{text}c"]
    with forwards(of) as ran, pytest.raises(BadArgument) as caught:
        harvest(of, texts, OUTPUT, tmp_path / "s", tokens_per_batch=1, progress=False)
    assert ran == []
    assert f"sequence 2 has the {noun} placeholder (token id {token}, {text}) at position 3" in str(
        caught.value
    )
    with pytest.raises(BadArgument):  # as the forward itself would have it
        of.collect(texts[2], OUTPUT)
    assert len(harvest(of, texts, OUTPUT, tmp_path / "cut", truncate=3, progress=False)) == 9
    # To a text model it is a token as any other.
    alone = Case("e2b").model()
    if not hasattr(alone._module.config, "vision_config"):  # the tests may be run on wrappers alone
        assert len(harvest(alone, texts, OUTPUT, tmp_path / "text", progress=False)) == 15


# ---- files -------------------------------------------------------------------------------------------------


def file(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("in.JSONL", b'{"text":"ab"}\n"c"', ["ab", "c"]),
        ("in.NdJson", b'{"text":"ab"}\n"c"', ["ab", "c"]),
        ("in.Json", b'{"text":"ab"}\n"c"', ["ab", "c"]),
        ("bom.txt", b"\xef\xbb\xbfab\nc\n", ["ab", "c"]),
        ("bom.jsonl", b'\xef\xbb\xbf"ab"\n', ["ab"]),
        ("inner.txt", b"ab\n\xef\xbb\xbfc\n", ["ab", "\ufeffc"]),
        ("cr.txt", b"ab\rxy\nc\n", ["ab\rxy", "c"]),
        ("crlf.txt", b"ab\r\nc\r\n", ["ab", "c"]),
        ("separator.txt", "a\u2028b\x0bc\x85d\n".encode(), ["a\u2028b\x0bc\x85d"]),
        ("blank.txt", b"\nab\n \t\r\n\n c \n\n", ["ab", " c "]),
        ("blank.jsonl", b'\n"ab"\n\n"c"\n \n', ["ab", "c"]),
        ("ids.jsonl", b"[2, 30]\n[2, 31, 32]\n", [[2, 30], [2, 31, 32]]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_lines_of_a_file(name: str, content: bytes, wanted: list[Any], tmp_path: Path):
    assert tokens(file(tmp_path, name, content)) == tokens(wanted)


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "pieces"),
    [
        ("latin.txt", b"ab\ncaf\xe9\n", ["line 2 of", "latin.txt is not UTF-8 text", "byte 3"]),
        ("latin.jsonl", b'"ab"\n"caf\xe9"\n', ["line 2 of", "latin.jsonl is not UTF-8 text"]),
        ("in.jsonl.gz", gzip.compress(b'"ab"'), ["line 1 of", "not UTF-8", "compressed: unpack it"]),
        ("deep.jsonl", b'"ab"\n' + DEEP, ["line 2 of", "is no JSON"]),
        ("broken.jsonl", b'"ab"\n\n{"text": \n', ["line 3 of", "is no JSON"]),
        ("array.json", b'[\n "ab",\n "c"\n]\n', ["line 1 of", "is no JSON", "json.loads(Path(...)"]),
        ("line.json", b'["ab", "c"]\n', ["line 1 of", "no list of token ids: ['ab', 'c']", "json.loads"]),
        ("rows.json", b'[{"text": "ab"}]\n', ["line 1 of", "no list of token ids", "json.loads"]),
        ("field.jsonl", b'{"text":"ab"}\n\n{"body":"c"}\n', ["line 3 of", "has no 'text'; it has 'body'"]),
        ("null.jsonl", b'"ab"\n\nnull\n', ["sequence 1 (line 3 of", "no text", "None"]),
        ("range.jsonl", b"[2]\n\n[2, 900]\n", ["sequence 1 (line 3 of", "token id 900"]),
        ("half.jsonl", b'"ab"\n\n"a\\ud800b"\n', ["sequence 1 (line 3 of", "surrogate pair"]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_line_that_cannot_be_meant_is_named(name: str, content: bytes, pieces: list[str], tmp_path: Path):
    said = refusal(file(tmp_path, name, content))
    assert [piece for piece in pieces if piece not in said] == [], said


def test_a_broken_line_that_is_no_array_says_nothing_of_arrays(tmp_path: Path):
    assert "json.loads" not in refusal(file(tmp_path, "in.jsonl", b'{"text": \n'))


def test_a_row_without_the_field_is_named_by_its_number():
    assert "row 1 has no 'text'; it has 'body'" in refusal([{"text": "a"}, {"body": "b"}])


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    place = file(tmp_path, "in.txt", b"ab\n")
    monkeypatch.setattr(Path, "open", refuse)
    assert f"{place} cannot be read: [Errno 13] Permission denied" in refusal(place)


def test_sequences_are_numbered_as_the_lines_that_hold_something(tmp_path: Path):
    rows = [{"text": text, "label": label} for label, text in enumerate(["opal", "jade", "agate"])]
    lines = "\n\n".join(json.dumps(row) for row in rows)
    store = harvest(
        model(),
        file(tmp_path, "in.jsonl", lines.encode()),
        OUTPUT,
        tmp_path / "s",
        positions="last",
        progress=False,
    )
    labels = torch.tensor([row["label"] for row in rows])[store.sequences].tolist()
    lasts = [model().tokenizer.decode([token]) for token in store.token_ids.tolist()]
    assert sorted(zip(labels, lasts, strict=True)) == [(0, "l"), (1, "e"), (2, "e")]


# ---- what comes as other libraries give it -----------------------------------------------------------------


class MapStyle:
    """A data set as torch has them: no iterable."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, at: int) -> Any:
        assert 0 <= at < 2
        return {"input_ids": [OPAL, JADE][at]}


def test_a_map_style_data_set_gives_its_items():
    assert tokens(MapStyle()) == [OPAL, JADE]


def test_the_tokenizers_answers_to_one_text_each_are_sequences():
    of = model()
    texts = ["opal", "a longer jade"]
    wanted = [of.tokenizer(text)["input_ids"] for text in texts]
    answers = [of.tokenizer(text, return_tensors="pt", padding="max_length", max_length=30) for text in texts]
    assert answers[0]["input_ids"].shape == (1, 30)
    assert tokens(answers) == wanted
    assert tokens([torch.tensor([OPAL]), torch.tensor([JADE])]) == [OPAL, JADE]
    assert "is no text and no list of token ids" in refusal([torch.tensor([OPAL, OPAL])])


def test_a_row_of_nothing_and_a_data_set_in_splits():
    assert (
        refusal([{"text": "opal"}, {"text": None}])
        == "harvest: row 1: its 'text' is None. Leave the row out."
    )
    assert "Of a data set in splits give one, as given['train']" in refusal({"train": [{"text": "opal"}]})


def test_an_open_file_is_refused(tmp_path: Path):
    (tmp_path / "in.txt").write_text("opal\n")
    with (tmp_path / "in.txt").open() as file:
        assert "give its Path instead" in refusal(file)
