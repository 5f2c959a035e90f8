"""`verify` on wrappers: what the towers make of images, frames and sounds, and faults put into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from gemloupe import StandardizedTransformer, verify
from gemloupe.errors import BadArgument
from gemloupe.reference.prompts import Prompt, media_prompt
from gemloupe.reference.towers import AudioTower, towers
from gemloupe.testing import SHAPES, tiny, tiny_config, tiny_module, tiny_tokenizer
from tests.core.models import SEED
from tests.reference.multimodal import TAKES_FRAMES, case
from tests.reference.test_verify_faults import SLIGHTLY, answers, attribute, scaled

WITH_AUDIO: Final = ("e2b", "e4b", "12b")


def built_in(shape: str) -> Prompt:
    config: Any = tiny_config(shape, wrapper=True)
    own = towers(config)
    assert own is not None
    model = tiny(shape, wrapper=True)
    return media_prompt(model.plan, own, frozenset(range(20)), 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_holds_in_low_precision(shape: str, dtype: torch.dtype):
    report = verify(tiny(shape, wrapper=True, seed=SEED, dtype=dtype))
    assert report.held, report.first
    of_towers = [row for row in report if row.name.startswith(("vision", "projector", "audio"))]
    # What is allowed of a value by itself is no more than a few roundings.
    steps = sorted(row.tolerance / report.rounding for row in of_towers if row.look == "step")
    assert steps[len(steps) // 2] < 16


@pytest.mark.parametrize("shape", SHAPES)
def test_the_built_in_prompt_has_images_of_two_sizes_and_a_sound_each_padded(shape: str):
    prompt = built_in(shape)
    assert prompt.media is not None
    assert prompt.kinds is not None
    assert prompt.media.kinds == ({"image", "audio"} if shape in WITH_AUDIO else {"image"})
    places = prompt.media.image_position_ids
    assert places is not None
    real = places.ne(-1).all(-1).sum(-1)
    assert len(real.unique()) == 2
    assert int(real.max()) < places.shape[1]
    if (frames := prompt.media.input_features_mask) is not None:
        assert not frames.all()
    again = built_in(shape).encoding
    assert all(torch.equal(value, again[name]) for name, value in prompt.encoding.items())
    runs = prompt.kinds[0].eq(1).long().diff().eq(1).sum()
    assert runs == 2  # with text between them


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_processor_makes_can_be_verified_on(shape: str):
    one = case(shape, "image", "audio")
    model = StandardizedTransformer(one.module, tokenizer=tiny_tokenizer())
    encoding = {name: value for name, value in one.encoding.items() if name != "position_ids"}
    report = verify(model, encoding)
    assert report.held, report.first
    assert report.row("vision.image_features").absolute > 0
    # By step the stream is made of the model's own features, every bit of them.
    assert report.row("layers[0].layer_input").relative == 0
    assert report.row("layers[0].layer_input", "whole").relative > 0
    absent = {absent.name: absent.reason for absent in report.absent}
    assert absent["vision.video_features"] == "no forward was given a frame of video."
    # What tells which tokens are of images may be left out: it is seen from the tokens.
    del encoding["mm_token_type_ids"]
    assert [row.relative for row in verify(model, encoding)] == [row.relative for row in report]


@pytest.mark.skipif(not TAKES_FRAMES, reason="transformers 5.20 takes no frames")
@pytest.mark.parametrize("shape", ["e2b", "26b-a4b", "12b"])
def test_frames_of_video_can_be_verified_on(shape: str):
    one = case(shape, "video")
    model = StandardizedTransformer(one.module, tokenizer=tiny_tokenizer())
    report = verify(model, {name: v for name, v in one.encoding.items() if name != "position_ids"})
    assert report.held, report.first
    assert report.row("vision.video_features").absolute > 0
    assert {"vision.image_features"} <= {absent.name for absent in report.absent}


def test_text_alone_says_that_the_towers_did_not_run():
    report = verify(tiny("e2b", wrapper=True), "The capital of France is")
    assert report.held
    absent = {absent.name: absent.reason for absent in report.absent}
    assert absent["vision"] == "no forward was given an image or a frame of video."
    assert absent["audio"] == "no forward was given a sound."
    silent = {absent.name: absent.reason for absent in verify(tiny("31b", wrapper=True)).absent}
    assert silent["audio"] == "this checkpoint takes no sound."


# ---- faults -----------------------------------------------------------------------------------------------

VISION: Final = "model.vision_tower.encoder.layers.1"
AUDIO: Final = "model.audio_tower.layers.1"


def wrapped(module: Any) -> Any:
    return StandardizedTransformer(module, tokenizer=tiny_tokenizer())


def transposed(model: Any) -> None:
    """The position embeddings of columns and rows are mistaken for one another."""
    embedder = model.get_submodule("model.vision_tower.patch_embedder")
    before = embedder._position_embeddings
    embedder._position_embeddings = lambda places, padding: before(places.flip(-1), padding)


def unclipped(path: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.get_submodule(path).use_clipped_linears = False

    return change


def pooled_as_if_wider(model: Any) -> None:
    pooler = model.get_submodule("model.vision_tower.pooler")
    pooler.root_hidden_size *= SLIGHTLY


def soft_tokens_in_another_order(model: Any) -> None:
    answers(model.get_submodule("model.embed_vision"), lambda out: out.flip(0))


FAULTS: Final[dict[str, tuple[str, Callable[[Any], None], str]]] = {
    "patches": (
        "e2b",
        scaled("model.vision_tower.patch_embedder.input_proj"),
        "vision.patch_embeddings",
    ),
    "places": ("31b", transposed, "vision.layers[0].layer_input"),
    "vision's norm": (
        "e2b",
        scaled(f"{VISION}.input_layernorm"),
        "vision.layers[1].self_attn.attention_input",
    ),
    "vision's keys": ("e4b", scaled(f"{VISION}.self_attn.k_norm"), "vision.layers[1].self_attn.own_keys"),
    "vision's scale": (
        "26b-a4b",
        attribute(f"{VISION}.self_attn", "scaling"),
        "vision.layers[1].self_attn.attention_scores",
    ),
    "vision's clipping": (
        "e2b",
        unclipped(f"{VISION}.mlp.down_proj"),
        "vision.layers[1].mlp.mlp_projection",
    ),
    "pooling": ("31b", pooled_as_if_wider, "projector.soft_tokens"),
    "projector": ("26b-a4b", scaled("model.embed_vision"), "vision.image_features"),
    "order": ("31b", soft_tokens_in_another_order, "vision.image_features"),
    "merged patches": ("12b", scaled("model.embed_vision.patch_ln2"), "vision.patch_embeddings"),
    "places of merged patches": ("12b", scaled("model.embed_vision.pos_norm"), "vision.tower_output"),
    "convolution": (
        "e2b",
        scaled("model.audio_tower.subsample_conv_projection.layer1.act", 1.1),
        "audio.frame_embeddings",
    ),
    "audio's clipping": (
        "e4b",
        unclipped(f"{AUDIO}.feed_forward2.ffw_layer_1"),
        "audio.layers[1].feed_forward2.mlp_output",
    ),
    "audio's residual": (
        "e2b",
        attribute(f"{AUDIO}.feed_forward1", "post_layer_scale"),
        "audio.layers[1].feed_forward1.mlp_output",
    ),
    "audio's scale": (
        "e2b",
        attribute(f"{AUDIO}.self_attn", "q_scale"),
        "audio.layers[1].self_attn.attention_output",
    ),
    "light convolution": (
        "e2b",
        scaled(f"{AUDIO}.lconv1d.conv_norm"),
        "audio.layers[1].lconv1d.convolution_output",
    ),
    "norm out": ("e2b", scaled(f"{AUDIO}.norm_out"), "audio.layers[1].layer_output"),
    "audio's last projection": (
        "e4b",
        scaled("model.audio_tower.output_proj"),
        "audio_projector.soft_tokens",
    ),
    "raw frames": ("12b", scaled("model.embed_audio.embedding_projection"), "audio.audio_features"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_tower_is_found_where_it_is(fault: str):
    shape, install, name = FAULTS[fault]
    module = tiny_module(shape, wrapper=True, seed=SEED)
    install(module)
    report = verify(wrapped(module), built_in(shape).encoding)
    assert not report.held
    assert report.first is not None
    assert report.first.name == name


# ---- refusals ---------------------------------------------------------------------------------------------


def test_media_that_cannot_be_verified_on_are_refused():
    one = case("e2b")
    model = wrapped(one.module)
    encoding: dict[str, Tensor] = {n: v for n, v in one.encoding.items() if n != "position_ids"}
    with pytest.raises(BadArgument, match=r"verify takes input_ids, .* not position_ids"):
        verify(model, one.encoding)
    if TAKES_FRAMES:
        with pytest.raises(BadArgument, match="images or frames of video, one at a time"):
            verify(model, encoding)
    with pytest.raises(BadArgument, match="pixel_values and image_position_ids come together"):
        verify(model, {"input_ids": encoding["input_ids"], "pixel_values": encoding["pixel_values"]})
    with pytest.raises(BadArgument, match=r"the token of image \(7\), .* there is no image"):
        verify(model, {"input_ids": [[2, 7, 40]]})
    silent = wrapped(tiny_module("31b", wrapper=True))
    sound = {name: encoding[name] for name in ("input_features", "input_features_mask")}
    with pytest.raises(BadArgument, match="this model takes no audio"):
        verify(silent, {"input_ids": [[2, 30, 40]], **sound})


def test_a_tower_of_another_kind_is_refused():
    module = tiny_module("31b", wrapper=True)
    del module.model.vision_tower.std_scale
    with pytest.raises(BadArgument, match=r"model\.vision_tower\.std_scale is missing"):
        verify(wrapped(module))
    assert isinstance(case("e2b").towers.audio, AudioTower)
