"""What the towers are whatever their numbers: laws of padding and of what belongs to whom; and refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from gemloupe.errors import BadArgument, GemloupeError, UnsupportedModel
from gemloupe.reference import Media, Weights, forward, parts, towers
from gemloupe.reference.media import scattered
from gemloupe.reference.towers import VisionTower
from gemloupe.reference.vision import pooled, vision_parts
from gemloupe.testing import SHAPES, tiny_config
from tests.reference.multimodal import SOUNDS, State, case, computed, run

WITH_AUDIO: Final = ("e2b", "e4b", "12b")
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_sounding = pytest.mark.parametrize("shape", WITH_AUDIO)


def features(weights: Weights, encoding: State, of: str) -> Tensor:
    return computed(weights, encoding)[of]


def alike(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# ---- laws -------------------------------------------------------------------------------------------------


@each_shape
def test_what_a_padded_row_holds_reaches_no_feature(shape: str):
    one = case(shape, "image")
    encoding, before = one.encoding, one.expected["vision.image_features"]
    padded = encoding["image_position_ids"].eq(-1).all(-1)
    assert padded.any(-1).sum() == 3
    pixels = encoding["pixel_values"].masked_fill(padded[..., None], 0.8)
    alike(features(one.weights, encoding | {"pixel_values": pixels}, "vision.image_features"), before)
    rows = {
        "pixel_values": pad(encoding["pixel_values"], (0, 0, 0, 36), value=0.3),
        "image_position_ids": pad(encoding["image_position_ids"], (0, 0, 0, 36), value=-1),
    }
    alike(features(one.weights, encoding | rows, "vision.image_features"), before)
    # And a row that is real does.
    changed = encoding | {"pixel_values": encoding["pixel_values"].masked_fill(~padded[..., None], 0.8)}
    assert not torch.allclose(features(one.weights, changed, "vision.image_features"), before)


@each_sounding
def test_what_the_padded_end_of_a_sound_holds_reaches_no_feature(shape: str):
    one = case(shape, "audio")
    encoding, before = one.encoding, one.expected["audio.audio_features"]
    real = encoding["input_features_mask"]
    sounds = encoding["input_features"].masked_fill(~real[..., None], 5.0)
    alike(features(one.weights, encoding | {"input_features": sounds}, "audio.audio_features"), before)
    longer = {
        "input_features": pad(encoding["input_features"], (0, 0, 0, 8), value=2.0),
        "input_features_mask": pad(real, (0, 8), value=False),
    }
    alike(features(one.weights, encoding | longer, "audio.audio_features"), before)
    # And a frame that is real does: the last one of the longer sound.
    sounds = encoding["input_features"].clone()
    sounds[0, SOUNDS[0] - 4 if shape != "12b" else -1] = 5.0
    changed = features(one.weights, encoding | {"input_features": sounds}, "audio.audio_features")
    assert not torch.allclose(changed, before)


@each_shape
def test_an_image_is_itself_whatever_the_others_are(shape: str):
    one = case(shape, "image")
    before = one.expected["vision.image_features"].split([6, 4, 4])
    pixels = one.encoding["pixel_values"].clone()
    pixels[0] = 0
    after = features(one.weights, one.encoding | {"pixel_values": pixels}, "vision.image_features")
    after = after.split([6, 4, 4])
    assert not torch.allclose(after[0], before[0])
    alike(after[1], before[1])
    alike(after[2], before[2])


@each_sounding
def test_a_sound_is_itself_whatever_the_others_are(shape: str):
    one = case(shape, "audio")
    first = 9 if shape == "12b" else 11
    before = one.expected["audio.audio_features"]
    sounds = one.encoding["input_features"].clone()
    sounds[0] = 0
    after = features(one.weights, one.encoding | {"input_features": sounds}, "audio.audio_features")
    assert not torch.allclose(after[:first], before[:first])
    alike(after[first:], before[first:])


@pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])
def test_a_place_is_where_an_image_is_seen(shape: str):
    one = case(shape, "image")
    places = one.encoding["image_position_ids"]
    moved = places.where(places < 0, places.flip(-1))
    changed = one.encoding | {"image_position_ids": moved}
    if shape == "12b":  # where a wide image and a tall one have as many tokens
        before, after = (features(one.weights, e, "vision.image_features") for e in (one.encoding, changed))
        assert not torch.allclose(before, after)
    else:
        before, after = (computed(one.weights, e)["vision.tower_output"] for e in (one.encoding, changed))
        assert not torch.allclose(before, after)


def test_a_square_without_a_patch_leaves_no_soft_token():
    one = case("31b", "image")
    tower, stream = one.module.model.vision_tower, one.expected["vision.tower_output"]
    places = one.encoding["image_position_ids"].clone()
    hole = (places[0] // 2 == torch.tensor([1, 0])).all(-1)
    assert hole.sum() == 4
    places[0, hole] = -1
    with torch.no_grad():
        expected = tower(one.encoding["pixel_values"], places).last_hidden_state
    found = list(vision_parts(one.weights, one.encoding["pixel_values"], places, features="image_features"))
    soft = found[-1]["projector.soft_tokens"]
    assert len(soft) == 13
    torch.testing.assert_close(soft.float(), expected, rtol=1e-4, atol=1e-5)
    again = pooled(one.weights, found[-1]["vision.tower_output"], places, features="image_features")
    assert torch.equal(again["projector.soft_tokens"], soft)
    assert stream.shape == found[-1]["vision.tower_output"].shape


# ---- the scatter ------------------------------------------------------------------------------------------


@each_shape
def test_features_take_the_places_of_their_tokens(shape: str):
    one = case(shape)
    values, ids = one.expected, one.encoding["input_ids"]
    stream, tokens = values["layers[0].layer_input"], values["token_embeddings"]
    text = torch.ones_like(ids, dtype=torch.bool)
    for kind in one.kinds:
        host = "audio" if kind == "audio" else "vision"
        mask = values[f"{host}.{kind}_token_mask"]
        assert torch.equal(mask, ids == getattr(one.config, f"{kind}_token_id"))
        assert torch.equal(stream[mask], values[f"{host}.{kind}_features"])
        text &= ~mask
    assert torch.equal(stream[text], tokens[text])
    pads = tokens[~text]
    assert torch.equal(pads, pads[:1].expand_as(pads))
    alone = forward(
        one.config, one.module.state_dict(), torch.tensor([[one.config.text_config.pad_token_id]])
    )
    assert torch.equal(pads[0], alone["token_embeddings"][0, 0])
    if one.plan.per_layer_input_size:
        own, context = values["per_layer_token_inputs"][~text], values["per_layer_context_inputs"][~text]
        assert torch.equal(own, own[:1].expand_as(own))
        # The other half is projected from the features.
        assert not torch.allclose(context, context[:1].expand_as(context))


@each_shape
def test_a_token_without_its_medium_is_padding(shape: str):
    one = case(shape)
    ids = one.encoding["input_ids"]
    state = one.module.state_dict()
    found = forward(one.config, state, ids, one.encoding["attention_mask"])
    with torch.no_grad():
        told = {name: one.encoding[name] for name in ("input_ids", "attention_mask", "position_ids")}
        expected = run(one.module, one.towers, told)["logits"]
    real = one.encoding["attention_mask"].bool()
    torch.testing.assert_close(found["logits"][real].float(), expected[real], rtol=1e-3, atol=1e-3)
    assert torch.equal(found["input_ids"], ids)
    assert not any(name.startswith(("vision", "audio")) for name in found)


@each_shape
def test_given_features_are_what_the_stream_takes(shape: str):
    one = case(shape, "image")
    given = torch.zeros_like(one.expected["vision.image_features"])
    given[0] = 1
    after = computed(one.weights, one.encoding, given={"vision.image_features": given})
    mask = after["vision.image_token_mask"]
    assert torch.equal(after["layers[0].layer_input"][mask], given)
    assert torch.equal(after["vision.image_features"], one.expected["vision.image_features"])
    assert not torch.allclose(after["logits"], one.expected["logits"])


@pytest.mark.parametrize("shape", ["e2b", "12b"])
def test_a_given_value_of_the_tower_is_of_the_images_where_there_are_frames_too(shape: str):
    one = case(shape, "image", "video")
    if "video" not in one.kinds:
        pytest.skip("this transformers takes no frames")
    given = {"vision.patch_embeddings": torch.zeros_like(one.expected["vision.patch_embeddings"])}
    after = computed(one.weights, one.encoding, given=given)
    assert not torch.allclose(after["vision.image_features"], one.expected["vision.image_features"])
    assert torch.equal(after["vision.video_features"], one.expected["vision.video_features"])
    counts = []
    for of in (one, case(shape, "image")):  # a function is told of both passes
        told: list[str] = []
        computed(of.weights, of.encoding, given=lambda name, value, told=told: told.append(name) or value)
        counts.append(told.count("vision.patch_embeddings"))
    assert counts[0] == 2 * counts[1] > 0


# ---- refusals ---------------------------------------------------------------------------------------------

UP: Final = "model.vision_tower.encoder.layers.1.mlp.up_proj.linear.weight"
BOUND: Final = "model.audio_tower.layers.0.lconv1d.linear_end.output_max"


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
    return lambda state: state | {name: change(state[name])}


def without(name: str) -> Callable[[State], State]:
    return lambda state: {key: value for key, value in state.items() if key != name}


STATES: Final[dict[str, tuple[Callable[[State], State], type[GemloupeError], str]]] = {
    "missing": (without(UP), BadArgument, f"{UP} is missing"),
    "no bound": (without(BOUND), BadArgument, f"{BOUND} is missing"),
    "no projector": (
        without("model.embed_audio.embedding_projection.weight"),
        BadArgument,
        "model.embed_audio.embedding_projection.weight is missing",
    ),
    "turned": (changed(UP, lambda w: w.T), BadArgument, f"{UP} has the shape [24, 28]; by the config it is"),
    "an adapter": (
        lambda state: state | {"model.vision_tower.lora_A.weight": torch.ones(2, 2)},
        BadArgument,
        "model.vision_tower.lora_A.weight: the reference knows no such weight",
    ),
    "int8": (changed(UP, lambda w: w.to(torch.int8)), UnsupportedModel, f"{UP} is quantized"),
    "NaN": (changed(UP, lambda w: w * torch.nan), BadArgument, f"{UP} holds NaN"),
    "a bound that is NaN": (changed(BOUND, lambda w: w * torch.nan), BadArgument, f"{BOUND} holds NaN"),
}


@pytest.mark.parametrize("why", STATES)
def test_a_towers_tensor_that_cannot_be_read_is_named(why: str):
    change, error, message = STATES[why]
    one = case("e2b", "image", "audio")
    with pytest.raises(error, match=re.escape(message)):
        computed(Weights(one.config, change(one.module.state_dict())), one.encoding)


def test_a_bound_may_be_infinite_and_then_clips_nothing():
    one = case("e2b", "audio")
    state = one.module.state_dict()
    bounds = {name: w for name, w in state.items() if name.endswith(("_min", "_max"))}
    wide, open_ = (state | {name: w * factor for name, w in bounds.items()} for factor in (1e6, torch.inf))
    found, expected = (
        features(Weights(one.config, s), one.encoding, "audio.audio_features") for s in (open_, wide)
    )
    assert torch.equal(found, expected)
    assert not torch.allclose(found, one.expected["audio.audio_features"])


def test_every_tensor_of_a_wrapper_is_known():
    for shape in SHAPES:
        one = case(shape)
        named = one.weights.plan.parameter_shapes() | one.towers.shapes()
        theirs = {
            name.replace("model.language_model.", "model."): tuple(tensor.shape)
            for name, tensor in one.module.state_dict().items()
        }
        assert {n: s for n, s in theirs.items() if n in named} == named
        assert {n for n in theirs if n not in named} <= {"lm_head.weight"} | {
            f"model.layers.{i}.layer_scalar" for i in range(one.plan.num_layers)
        }


def test_the_text_alone_needs_no_towers():
    one = case("e2b", "image")
    weights = Weights(one.config.text_config, one.module.state_dict())
    assert weights.towers is None
    assert towers(one.config.text_config) is None
    with pytest.raises(BadArgument, match="media are of a wrapper"):
        computed(weights, one.encoding)
    plan = Weights(one.plan, one.module.state_dict(), towers=one.towers)
    assert torch.equal(computed(plan, one.encoding)["logits"], one.expected["logits"])


CONFIGS: Final[dict[str, tuple[str, str, dict[str, Any], str]]] = {
    "an unknown field": ("e2b", "vision_config", {"gated": True}, "config.vision_config.gated=True"),
    "an activation": (
        "e2b",
        "audio_config",
        {"hidden_act": "relu"},
        "config.audio_config.hidden_act='relu'",
    ),
    "no pooling": (
        "31b",
        "vision_config",
        {"pooling_kernel_size": 1},
        "config.vision_config.pooling_kernel_size=1: transformers keeps the padding then",
    ),
    "an odd quarter": ("31b", "vision_config", {"head_dim": 10}, "config.vision_config.head_dim=10"),
    "another rotation": (
        "31b",
        "vision_config",
        {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0, "factor": 2.0}},
        "config.vision_config.rope_parameters=",
    ),
    "another width": ("12b", "vision_config", {"output_proj_dims": 30}, "config.vision_config.output_proj"),
}


@pytest.mark.parametrize("why", CONFIGS)
def test_a_towers_config_of_another_kind_is_refused(why: str):
    shape, of, fields, message = CONFIGS[why]
    config: Any = tiny_config(shape, wrapper=True)
    for name, value in fields.items():
        setattr(getattr(config, of), name, value)
    with pytest.raises(UnsupportedModel, match=re.escape(message)):
        towers(config)


def test_media_that_do_not_fit_are_refused():
    one = case("e2b", "image", "audio")
    pixels, places = one.encoding["pixel_values"], one.encoding["image_position_ids"]
    assert isinstance(one.towers.vision, VisionTower)
    size = one.towers.vision.table_size
    wrong: list[tuple[State, str]] = [
        ({"pixel_values": pixels[..., :-1]}, r"pixel values are \[images patches 48\], not \[3, 28, 47\]"),
        ({"image_position_ids": places[:, :-1]}, r"position ids are whole numbers \[images patches 2\]"),
        ({"image_position_ids": places + size}, f"position ids go up to {size + 7}; the table ends at"),
        ({"pixel_values": pixels[:, :-1], "image_position_ids": places[:, :-1]}, "27 rows of patches do not"),
        ({"image_position_ids": places.clamp(max=-1)}, "an image is all padding"),
        ({"pixel_values": pixels[:2], "image_position_ids": places[:2]}, "14 image tokens, .* are 10"),
        ({"input_features": one.encoding["input_features"][..., :8]}, "have 8 mel bins; this tower reads 16"),
        ({"input_features_mask": torch.ones(2, 3)}, r"input_features_mask is \[2, 3\]; it is \[2, 44\]"),
    ]
    for change, message in wrong:
        with pytest.raises(BadArgument, match=message):
            computed(one.weights, one.encoding | change)
    with pytest.raises(BadArgument, match="input_features and input_features_mask come together"):
        Media(input_features=one.encoding["input_features"])
    silent = case("31b", "image")
    with pytest.raises(BadArgument, match="this model takes no audio"):
        computed(
            silent.weights,
            silent.encoding
            | {name: one.encoding[name] for name in ("input_features", "input_features_mask")},
        )


def test_the_pieces_of_a_medium_return_the_stream():
    one = case("31b", "image")
    ids, media = one.encoding["input_ids"], Media.of(one.encoding)
    assert media is not None
    walk = scattered(one.weights, media, ids, one.expected["token_embeddings"])
    found = []
    while True:
        try:
            found.append(next(walk))
        except StopIteration as end:
            stream = end.value
            break
    assert torch.equal(stream, one.expected["layers[0].layer_input"])
    assert isinstance(one.towers.vision, VisionTower)
    assert len(found) == one.towers.vision.num_layers + 2
    assert Media.of({"input_ids": ids}) is None
    assert sum(1 for _ in parts(one.weights, ids, media=media)) == len(found) + 2 + one.plan.num_layers + 1
