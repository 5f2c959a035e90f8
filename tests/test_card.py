"""The model card: against the plan, against the wrapped model's own answers, and as text."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
from rich.console import Console
from transformers import LlamaConfig

from gemloupe.card import Card, read_card
from gemloupe.errors import BadArgument, LoadError, UnsupportedModel
from gemloupe.plan import plan
from gemloupe.testing import SHAPES, tiny, tiny_config
from tests.test_plan import PUBLISHED, WRAPPERS

SIZES: Final = {
    "E2B": (35, 1536, "4.63 B (4,628,569,344; text model, tied head counted once)"),
    "E4B": (42, 2560, "7.46 B (7,463,013,376; text model, tied head counted once)"),
    "26B-A4B": (30, 2816, "25.23 B (25,233,141,760; text model, tied head counted once)"),
    "31B": (60, 5376, "30.70 B (30,697,345,280; text model, tied head counted once)"),
    "12B": (48, 3840, "11.91 B (11,907,350,272; text model, tied head counted once)"),
}
"""Layers, hidden size and parameters of the published checkpoints."""


def printed(card: Card, width: int = 200) -> str:
    console = Console(width=width, color_system=None, markup=False, highlight=False)
    with console.capture() as capture:
        console.print(card)
    return capture.get()


def fact(text: str, name: str) -> str:
    """The line of the card that begins with `name`."""
    (line,) = re.findall(rf"^  {name}  +(.+?) *$", text, re.MULTILINE)
    return line


def block_rows(text: str) -> list[list[str]]:
    """The cells of the block table, row by row, the header first."""
    table = text.partition("Blocks\n")[2].partition("\n\n")[0]
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A directory that holds the config of a published checkpoint and nothing else."""
    PUBLISHED[request.param].text_config().save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    return str(tmp_path)


each_folder = pytest.mark.parametrize(
    ("folder", "name"), [(name, name) for name in PUBLISHED], indirect=["folder"]
)


@each_folder
def test_the_card_of_a_published_checkpoint(folder: str, name: str):
    card = read_card(folder)
    text = printed(card)
    layers, hidden, parameters = SIZES[name]
    full = len(PUBLISHED[name].full_blocks)
    assert card.plan.num_parameters == PUBLISHED[name].num_parameters
    assert text.splitlines()[0].strip() == folder
    assert fact(text, "layers") == f"{layers} ({layers - full} sliding, {full} full)"
    assert fact(text, "hidden size") == str(hidden)
    assert fact(text, "parameters") == parameters
    assert fact(text, "vocabulary") == "262,144"
    assert fact(text, "logit cap") == "30"
    assert fact(text, "model type") == PUBLISHED[name].model_type
    assert fact(text, "inputs") == "text"


HEADER: Final = (
    *("blocks", "kind", "window", "heads", "kv heads", "head_dim"),
    *("MLP width", "keys and values"),
)
BLOCKS: Final = {
    "E2B": [
        [*HEADER, "ple"],
        ["0-3, 5-8, 10-12", "sliding", "512", "8", "1", "256", "6144", "own", "256"],
        ["4, 9", "full", "8", "1", "512", "6144", "own", "256"],
        ["13", "sliding", "512", "8", "1", "256", "6144", "own, lent to 15-18, 20-23, 25-28, 30-33", "256"],
        ["14", "full", "8", "1", "512", "6144", "own, lent to 19, 24, 29, 34", "256"],
        ["15-18, 20-23, 25-28, 30-33", "sliding", "512", "8", "1", "256", "12288", "block 13's", "256"],
        ["19, 24, 29, 34", "full", "8", "1", "512", "12288", "block 14's", "256"],
    ],
    "26B-A4B": [
        [*HEADER, "experts"],
        [
            *("0-4, 6-10, 12-16, 18-22, 24-28", "sliding", "1024", "16", "8", "256", "2112"),
            *("own", "8 of 128, 704 wide"),
        ],
        [
            *("5, 11, 17, 23, 29", "full", "16", "2", "512", "2112"),
            *("own, values from k_proj", "8 of 128, 704 wide"),
        ],
    ],
    "12B": [
        [*HEADER],
        [
            *("0-4, 6-10, 12-16, 18-22, 24-28, 30-34, 36-40, 42-46", "sliding", "1024", "16", "8", "256"),
            *("15360", "own"),
        ],
        ["5, 11, 17, 23, 29, 35, 41, 47", "full", "16", "1", "512", "15360", "own, values from k_proj"],
    ],
}  # fmt: skip


@pytest.mark.parametrize(("folder", "name"), [(name, name) for name in BLOCKS], indirect=["folder"])
def test_the_block_table(folder: str, name: str):
    assert block_rows(printed(read_card(folder))) == BLOCKS[name]


@each_folder
def test_the_json_is_the_plan(folder: str, name: str):
    expected = plan(PUBLISHED[name].text_config())
    card = json.loads(read_card(folder).to_json())
    assert card["target"] == folder
    assert card["num_parameters"] == PUBLISHED[name].num_parameters
    assert card["kv_sharing"] == {str(i): list(them) for i, them in PUBLISHED[name].sharing.items()}
    fields = json.loads(json.dumps(dataclasses.asdict(expected)))
    assert {field: card[field] for field in fields} == fields
    assert len(card["traps"]) >= 7


@pytest.mark.parametrize("wrapper", [False, True], ids=["text", "wrapper"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_values_are_those_of_the_wrapped_model(shape: str, wrapper: bool):
    card = read_card(f"tiny:{shape}{':wrapper' if wrapper else ''}")
    assert card.plan == plan(tiny_config(shape, wrapper=wrapper))
    assert card.values == tuple(tiny(shape, wrapper=wrapper).support())
    assert {row["path"]: row["blocks"] for row in json.loads(card.to_json())["values"]} == {
        row.path: None if row.blocks is None else list(row.blocks) for row in card.values
    }


def test_the_values_as_text():
    text = printed(read_card("tiny:e2b")).partition("Values\n")[2].partition("\n\n")[0]
    cells = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    places = {place: names.split() for place, names, *_ in (row for row in cells if len(row) == 2)}
    assert places["layers[i]"] == [
        "layer_input",
        "per_layer_input",
        "mid_stream",
        "per_layer_output",
        "layer_output",
    ]
    assert {"mlp_input", "mlp_neurons", "mlp_projection", "mlp_output"} == set(places["layers[i].mlp"])
    assert places["layers[i].self_attn, blocks 0-4"] == ["own_keys", "own_values"]
    absent = [row[1].split() for row in cells if row[0] == "not here"]
    assert absent[1:] == [["vision.*", "projector.*"], ["audio.*", "audio_projector.*"]]
    assert "router_logits" in absent[0]
    assert "block 0 has no mixture of experts, its MLP is dense." in text
    mixture = printed(read_card("tiny:26b-a4b"))
    assert "this checkpoint has no per-layer embeddings" in mixture
    assert "has no mixture" not in mixture


def test_values_of_images_and_sound_by_their_place():
    def rows(name: str) -> list[str]:
        lines = printed(read_card(f"tiny:{name}:wrapper")).splitlines()
        return [re.sub(r" {2,}", ": ", line.strip()) for line in lines]

    assert "vision.layers[i]: layer_input mid_stream layer_output" in rows("e2b")
    assert "audio.layers[i].lconv1d: convolution_output" in rows("e2b")
    assert "not here: audio.* audio_projector.*" in rows("31b")
    assert "not here: vision.layers[i].* projector.*" in rows("12b")
    assert "not here: audio.frame_embeddings audio.layers[i].* audio_projector.*" in rows("12b")


@pytest.mark.parametrize(
    ("shape", "inputs"),
    [
        ("e2b", "text, images, video, audio"),
        ("26b-a4b", "text, images, video"),
        ("12b", "text, images, video, audio"),
    ],
)
def test_the_card_of_a_wrapper(shape: str, inputs: str):
    text = printed(read_card(f"tiny:{shape}:wrapper"))
    assert fact(text, "model type").endswith("_text, inside the multimodal wrapper")
    assert fact(text, "inputs") == inputs


WAYS_IN: Final = {
    "e2b": (
        "a tower of 2 blocks, 24 wide, 2 heads of 16, MLP width 28; patches of 4 x 4 pixels, 2 x 2 of them a "
        "soft token",
        "a tower of 2 blocks, 24 wide, 2 heads of 12, MLP width 96",
    ),
    "26b-a4b": (
        "a tower of 2 blocks, 24 wide, 2 heads of 16, MLP width 28; patches of 4 x 4 pixels, 2 x 2 of them a "
        "soft token",
        None,
    ),
    "12b": (
        "no tower, an embedder, 24 wide; patches of 8 x 8 pixels, each a soft token",
        "no tower, frames of raw samples, 20 wide",
    ),
}


@pytest.mark.parametrize("shape", WAYS_IN)
def test_how_images_and_sound_get_in(shape: str):
    images, audio = WAYS_IN[shape]
    text = printed(read_card(f"tiny:{shape}:wrapper"))
    assert fact(text, "images") == images
    if audio is not None:
        assert fact(text, "sound") == audio
    assert ("\n  sound  " in text) == (audio is not None)
    assert not re.search("^  (images|sound) ", printed(read_card(f"tiny:{shape}")), re.MULTILINE)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_wrappers_card_is_its_text_models(tmp_path: Path, name: str):
    text = PUBLISHED[name].text_config()
    WRAPPERS[text.model_type](text_config=text).save_pretrained(tmp_path)
    card = read_card(str(tmp_path))
    assert card.plan.wrapper
    assert (card.plan.blocks, card.plan.num_parameters) == (plan(text).blocks, PUBLISHED[name].num_parameters)


def test_an_untied_head_and_no_cap(tmp_path: Path):
    tiny_config("31b", tie_word_embeddings=False, final_logit_softcapping=None).save_pretrained(tmp_path)
    text = printed(read_card(str(tmp_path)))
    assert "embedding and head are two" in fact(text, "parameters")
    assert fact(text, "logit cap") == "none"


def test_nothing_is_cut_off_in_a_narrow_window():
    card = read_card("tiny:e2b:wrapper")
    narrow = printed(card, width=80)
    assert max(map(len, narrow.splitlines())) == 80
    assert "…" not in narrow
    assert [word for word in printed(card).split() if word not in narrow.split()] == []


def config_file(folder: Path, text: str) -> str:
    (folder / "config.json").write_text(text)
    return str(folder)


def test_a_target_that_is_wrong(tmp_path: Path):
    with pytest.raises(LoadError, match=r"has no config\.json"):
        read_card(str(tmp_path))
    with pytest.raises(LoadError, match="not a valid JSON"):
        read_card(config_file(tmp_path, "{"))
    with pytest.raises(UnsupportedModel, match="model_type"):
        read_card(config_file(tmp_path, "{}"))
    with pytest.raises(UnsupportedModel, match=r"does not hold together: .*hidden_size"):
        read_card(config_file(tmp_path, '{"model_type": "gemma4_text", "hidden_size": "wide"}'))
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="'llama' is not supported"):
        read_card(str(tmp_path))


@pytest.mark.parametrize("target", ["tiny:", "tiny:e3b", "tiny:E2B", "tiny:e2b:text", "tiny:e2b:"])
def test_a_tiny_target_that_is_wrong(target: str):
    with pytest.raises(BadArgument) as caught:
        read_card(target)
    assert all(f"tiny:{shape}" in str(caught.value) for shape in SHAPES)
    assert target in str(caught.value)


def test_the_card_loads_no_weights(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any):
        raise AssertionError("a module was built")

    monkeypatch.setattr("torch.nn.Module.__init__", refuse)
    card = read_card("tiny:e2b")
    assert printed(card)
    assert card.to_json()
    with pytest.raises(AssertionError, match="a module was built"):
        tiny("e2b")
