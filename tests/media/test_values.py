"""Every value of images, video and sound: a read that changes nothing, and what its definition says."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gemloupe.testing import SHAPES
from tests.media import hand
from tests.media.given import (
    KINDS,
    TOWERS,
    WITH_SOUND,
    axes,
    bare,
    close,
    everything,
    has,
    logits_of,
    model,
    paths,
    with_video,
)

ALONE = [(shape, kind) for shape in SHAPES for kind in KINDS if has(shape, kind)]
ALIKE = 3e-5  # float32 against float64; the norms run in float32


@cache
def taken(shape: str, kind: str, attention: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """The values of one call, all read, and its logits."""
    one, encoding = model(shape, attention, dtype), KINDS[kind](shape)
    with torch.no_grad(), one.trace(**encoding):
        values = one.record(paths(one, encoding))
        logits = one.logits.save()
    return values, logits


def same_logits(shape: str, kind: str, attention: str | None, dtype: torch.dtype) -> None:
    values, logits = taken(shape, kind, attention, dtype)
    assert torch.equal(logits, logits_of(bare(shape, attention, dtype), shape, KINDS[kind](shape)))
    assert all(values[path] is not None for path in values)


@pytest.mark.parametrize(("shape", "kind"), ALONE)
def test_logits_are_the_bare_models(shape, kind):
    same_logits(shape, kind, None, torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_the_bare_models_under_eager(shape):
    same_logits(shape, "everything", "eager", torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_the_bare_models_in_bfloat16(shape):
    same_logits(shape, "everything", None, torch.bfloat16)


# ---- definitions -------------------------------------------------------------------------------------------


def real_rows(value: Tensor, path: str, real: Tensor) -> Tensor:
    """Without padded rows of images or sounds, which nothing is said of; keys as they are, hidden or not."""
    found = axes(model("e2b"), path)
    axis = next((found.index(name) for name in ("patches", "frames", "query") if name in found), None)
    if axis is None:
        if "key" not in found:
            return value
        axis = found.index("key")
    return value.movedim(axis, 1)[real]


def compared(served: Any, wanted: dict[str, Tensor], real: Tensor, dtype: torch.dtype) -> float:
    worst = 0.0
    for path, value in wanted.items():
        found = real_rows(served(path), path, real)
        value = real_rows(value, path, real)
        if value.dtype == torch.bool:
            assert torch.equal(found, value), path
            continue
        if path.endswith("attention_scores"):
            seen = value > -torch.inf
            assert torch.equal(found > -1e30, seen), path
            found, value = found[seen], value[seen]
        assert found.dtype == dtype, path
        assert close(found, value) < ALIKE, (path, close(found, value))
        worst = max(worst, close(found, value))
    return worst


@pytest.mark.parametrize("attention", [None, "eager"], ids=["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_images_by_hand(shape, attention):
    values, _ = taken(shape, "everything", attention)
    encoding = everything(shape)
    wanted = hand.vision(bare(shape), encoding["pixel_values"], encoding["image_position_ids"])
    real = wanted["vision.patch_mask"]
    assert not real.all()
    assert real.sum(-1).unique().numel() == 3
    wanted["vision.image_features"] = wanted.pop("features")
    have = {path for path in values if path.startswith(("vision", "projector"))}
    assert have - wanted.keys() - {"vision.video_features"} == {
        "vision.image_token_mask",
        "vision.video_token_mask",
    }
    compared(lambda path: values[path], wanted, real, torch.float32)


@with_video
@pytest.mark.parametrize("shape", SHAPES)
def test_video_by_hand(shape):
    """The tower's values of a call that has video alone are those of its frames."""
    values, _ = taken(shape, "video")
    encoding = KINDS["video"](shape)
    wanted = hand.vision(bare(shape), encoding["pixel_values_videos"], encoding["video_position_ids"])
    wanted["vision.video_features"] = wanted.pop("features")
    compared(lambda path: values[path], wanted, wanted["vision.patch_mask"], torch.float32)


@pytest.mark.parametrize("shape", WITH_SOUND)
def test_sound_by_hand(shape):
    values, _ = taken(shape, "everything")
    encoding = everything(shape)
    wanted = hand.sound(bare(shape), encoding["input_features"], encoding["input_features_mask"])
    real = wanted["audio.frame_mask"]
    assert not real.all()
    have = {path for path in values if path.startswith("audio")}
    assert have - wanted.keys() == {"audio.audio_token_mask"}
    compared(lambda path: values[path], wanted, real, torch.float32)


@pytest.mark.parametrize("kind", ["everything", "image", "video", "audio"])
@pytest.mark.parametrize("shape", SHAPES)
def test_features_are_what_the_stream_holds(shape, kind):
    if not has(shape, kind):
        pytest.skip(f"{shape} takes no {kind} on this transformers release")
    values, _ = taken(shape, kind)
    encoding = KINDS[kind](shape)
    stream = values["layers[0].layer_input"]
    for feature, mask, token in (
        ("vision.image_features", "vision.image_token_mask", "image"),
        ("vision.video_features", "vision.video_token_mask", "video"),
        ("audio.audio_features", "audio.audio_token_mask", "audio"),
    ):
        if mask not in values:
            continue
        placeholders = encoding["input_ids"] == getattr(bare(shape).config, f"{token}_token_id")
        assert torch.equal(values[mask], placeholders)
        assert bool(placeholders.any()) == (feature in values)
        if feature in values:
            assert torch.equal(stream[placeholders], values[feature])
    words = (
        encoding["attention_mask"].bool()
        & ~values["vision.image_token_mask"]
        & ~values["vision.video_token_mask"]
    )
    if shape in WITH_SOUND:
        words &= ~values["audio.audio_token_mask"]
    assert torch.equal(stream[words], values["token_embeddings"][words])


# ---- identities --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", TOWERS)
def test_contributions_add_up_in_the_vision_tower(shape, dtype):
    values, _ = taken(shape, "everything", None, dtype)
    blocks = model(shape).plan.vision.blocks
    for block in blocks:
        at = f"vision.layers[{block.index}]"
        assert torch.equal(
            values[f"{at}.layer_input"] + values[f"{at}.self_attn.attention_output"],
            values[f"{at}.mid_stream"],
        )
        assert torch.equal(
            values[f"{at}.mid_stream"] + values[f"{at}.mlp.mlp_output"], values[f"{at}.layer_output"]
        )
        if block.index:
            before = f"vision.layers[{block.index - 1}].layer_output"
            assert torch.equal(values[f"{at}.layer_input"], values[before])
    assert torch.equal(
        values[f"vision.layers[{blocks[-1].index}].layer_output"], values["vision.tower_output"]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["e2b", "e4b"])
def test_contributions_add_up_in_the_audio_tower(shape, dtype):
    values, _ = taken(shape, "everything", None, dtype)
    module, plan = bare(shape, None, dtype), model(shape).plan.audio
    before = "audio.frame_embeddings"
    for block in plan.blocks:
        at = f"audio.layers[{block.index}]"
        assert torch.equal(values[f"{at}.layer_input"], values[before])
        stream = values[f"{at}.layer_input"]
        for part in ("feed_forward1.mlp_output", "self_attn.attention_output", "lconv1d.convolution_output"):
            stream = stream + values[f"{at}.{part}"]
        stream = stream + values[f"{at}.feed_forward2.mlp_output"]
        limit = min(module.config.audio_config.gradient_clipping, torch.finfo(dtype).max)
        with torch.no_grad():
            normed = module.model.audio_tower.layers[block.index].norm_out(stream.clamp(-limit, limit))
        assert torch.equal(normed, values[f"{at}.layer_output"])
        before = f"{at}.layer_output"
    assert torch.equal(values["audio.tower_output"], values[before])


@pytest.mark.parametrize("shape", TOWERS)
def test_a_pattern_is_eagers(shape):
    for path, value in taken(shape, "everything")[0].items():
        if path.startswith("vision") and path.endswith("attention_probabilities"):
            other = taken(shape, "everything", "eager")[0][path]
            real = taken(shape, "everything")[0]["vision.patch_mask"]
            assert close(value.movedim(2, 1)[real], other.movedim(2, 1)[real]) < 3e-6
            assert torch.allclose(value.sum(-1), torch.ones(()))
            assert bool((value[~real[:, None, None, :].expand_as(value)] == 0).all())
