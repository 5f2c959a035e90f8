"""Absence, order and calls that compute nothing: said at once, with the reason."""

from __future__ import annotations

import re

import pytest
import torch

from gemloupe.errors import BadArgument, NeverRan, OutOfOrder, Unavailable, UnknownName
from gemloupe.testing import SHAPES, tiny
from tests.media.by_hand import films, pictures
from tests.media.given import (
    TOWERS,
    VIDEO,
    WITH_SOUND,
    audio,
    bare,
    everything,
    image,
    logits_of,
    mark,
    model,
    none,
    paths,
    support,
    text,
    video,
)

MEDIA = ("vision", "projector", "audio", "audio_projector")


# ---- what a checkpoint lacks -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_text_model_says_that_it_takes_no_images(shape):
    one = tiny(shape)
    for row in one.support():
        if not row.path.startswith(MEDIA):
            continue
        assert not row.available
        what = "sound" if row.path.startswith("audio") else "images"
        reason = one.why_not(row.path.replace("[i]", "[0]"))
        assert reason is not None
        assert reason.startswith(f"this is the text-only model, which takes no {what}."), row.path
        assert "task=" in reason
    with pytest.raises(Unavailable, match="vision: this is the text-only model"):
        one.vision
    assert not hasattr(one, "vision")
    assert not hasattr(one, "audio")


def test_12b_has_no_tower():
    one = model("12b")
    for path in (
        "vision.layers[0].layer_output",
        "vision.layers[1].mlp.mlp_neurons",
        "projector.soft_tokens",
    ):
        assert not one.has(path)
        assert "12B" in str(one.why_not(path))
    for path in ("audio.layers[0].layer_output", "audio.frame_embeddings", "audio_projector.soft_tokens"):
        assert not one.has(path)
        assert "12B" in str(one.why_not(path))
    for path in ("vision.patch_embeddings", "vision.tower_output", "audio.tower_output", "audio.frame_mask"):
        assert one.has(path)
    assert not hasattr(one.vision, "layers")
    with pytest.raises(Unavailable, match=r"vision\.layers: this checkpoint \(12B\) has no vision tower"):
        one.vision.layers
    with pytest.raises(Unavailable, match="has no vision tower"):
        with one.trace(**image("12b")):
            one.projector.soft_tokens.save()
    assert one.plan.vision.blocks == ()


@pytest.mark.parametrize("shape", ["26b-a4b", "31b"])
def test_a_model_without_sound_says_so(shape):
    one = model(shape)
    for path in ("audio.audio_features", "audio.layers[0].layer_output", "audio_projector.soft_tokens"):
        assert "takes no sound" in str(one.why_not(path))
    with pytest.raises(BadArgument, match="takes no sound"):
        with one.trace(**audio("e2b")):
            one.logits.save()


@pytest.mark.parametrize("shape", SHAPES)
def test_support_says_which_blocks(shape):
    rows = {row.path: row for row in support(model(shape))}
    towers = shape in TOWERS
    assert rows["vision.layers[i].layer_output"].blocks == ((0, 1) if towers else ())
    assert rows["vision.layers[i].layer_output"].num_blocks == (2 if towers else 0)
    assert rows["vision.image_features"].available
    assert rows["audio.audio_features"].available == (shape in WITH_SOUND)
    assert rows["audio.layers[i].layer_output"].blocks == ((0, 1) if shape in ("e2b", "e4b") else ())
    assert rows["layers[i].self_attn.visible_keys"].blocks == tuple(range(model(shape).num_layers))


def test_an_unknown_name_in_a_tower_has_a_hint():
    one = model("e2b")
    with pytest.raises(UnknownName, match=r"vision\.layers\[0\]\.mlp\.mlp_output|mlp_output"):
        one.vision.layers[0].mlp_out
    with pytest.raises(UnknownName, match="image_features"):
        one.vision.image_feature
    with pytest.raises(UnknownName, match=r"does not exist|has 2"):
        one.has("vision.layers[9].layer_output")


# ---- what a call lacks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_a_call_without_images_says_so(shape):
    one = model(shape)
    have = [path for path in paths(one, everything(shape)) if path.startswith(MEDIA)]
    for path in have:
        if path.endswith("_token_mask"):
            continue
        name = path.rpartition(".")[2]
        noun = "sound" if path.startswith("audio") else "image"
        noun = "video" if name == "video_features" else noun
        either = "" if noun != "image" or name == "image_features" else " or video"
        with pytest.raises(NeverRan) as told:
            with one.trace(**none(shape)):
                _read(one, path)
        assert str(told.value) == (
            f"{path}: this call was given no {noun}{either}, so there is nothing to serve."
        )
    with torch.no_grad(), one.trace(**none(shape)):
        mask = one.vision.image_token_mask.save()
    assert mask.shape == none(shape)["input_ids"].shape
    assert not mask.any()


def _read(one, path):
    from gemloupe.paths import find

    return getattr(find(one, path)[0], path.rpartition(".")[2]).save()


@pytest.mark.parametrize("shape", SHAPES)
def test_images_do_not_stand_in_for_video(shape):
    one = model(shape)
    for encoding, path, noun in (
        (image(shape), "vision.video_features", "video"),
        (video(shape), "vision.image_features", "image"),
    ):
        with pytest.raises(NeverRan, match=f"{path}: this call was given no {noun}, so"):
            with one.trace(**encoding):
                _read(one, path)
        found = one.collect(encoding, [path, "logits"])
        assert found["logits"].shape[:2] == encoding["input_ids"].shape
        assert f"{path}: not computed" in repr(found)
        with pytest.raises(NeverRan, match=f"{path}: this call was given no {noun}, so"):
            found[path]
    with torch.no_grad(), one.trace(**video(shape)):
        patches = one.vision.patch_embeddings.save()
        found = one.record("layers[0].layer_input")
    assert len(patches) == len(video(shape)["pixel_values_videos"])
    assert found["layers[0].layer_input"].shape[:2] == video(shape)["input_ids"].shape


@pytest.mark.skipif(VIDEO, reason="this transformers release takes video in a forward")
@pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])
def test_video_is_refused_where_no_forward_takes_it(shape):
    encoding = text([2, *mark("video", 2), 60]) | films(shape, (1, 2, 1))
    with pytest.raises(BadArgument, match=r"forward of this transformers release drops `num_frames_per"):
        with model(shape).trace(**encoding):
            model(shape).logits.save()
    with torch.no_grad(), model(shape).generate(**encoding, max_new_tokens=1, do_sample=False):
        features = model(shape).vision.video_features.save()
    assert len(features) == 2


@pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])
def test_an_invoke_without_images_beside_one_with(shape):
    one = model(shape)
    for path in ("vision.tower_output", "vision.image_features"):
        with pytest.raises(NeverRan, match=f"{path}: this invoke was given no image.*another one was"):
            with one.trace() as tracer:
                with tracer.invoke(**image(shape)):
                    one.vision.patch_embeddings.save()
                with tracer.invoke(**text([2, 60])):
                    _read(one, path)
    with torch.no_grad(), one.trace(**image(shape)):
        logits = one.logits.save()
    assert torch.equal(logits, logits_of(bare(shape), shape, image(shape)))


# ---- order -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_late_reads_name_both_values(shape):
    one = model(shape)
    pairs = [
        ("vision.patch_embeddings", "vision.image_features"),
        ("vision.image_features", "layers[0].layer_input"),
        ("token_embeddings", "vision.patch_embeddings"),
        ("vision.image_token_mask", "token_embeddings"),
    ]
    if shape in TOWERS:
        pairs += [
            ("vision.layers[0].layer_output", "vision.layers[1].layer_output"),
            ("vision.layers[1].self_attn.attention_probabilities", "projector.soft_tokens"),
        ]
    if shape in WITH_SOUND:
        pairs += [
            ("vision.image_features", "audio.audio_features"),
            ("audio.tower_output", "layers[0].layer_input"),
        ]
    for early, late in pairs:
        with pytest.raises(OutOfOrder) as told:
            with one.trace(**everything(shape)):
                _read(one, late)
                _read(one, early)
        said = str(told.value)
        assert said.startswith(f"the read of {early} comes too late, after {late}: ")
        assert f"Read {early} before {late}" in said
    for early, late in pairs[:2]:
        with pytest.raises(OutOfOrder, match="comes too late"):
            with one.trace(**everything(shape)):
                _read(one, late)
                setattr(one.vision, early.rpartition(".")[2], torch.zeros(1))


@pytest.mark.parametrize("shape", TOWERS)
def test_a_tower_s_attention_has_no_order_of_its_own(shape):
    one = model(shape)
    with torch.no_grad(), one.trace(**image(shape)):
        host = one.vision.layers[1].self_attn
        own = host.own_keys.save()
        pattern = host.attention_probabilities.save()
        queries = host.attention_queries.save()
        seen = host.visible_keys.save()
        scores = host.attention_scores.save()
        keys = host.attention_keys.save()
        logits = one.logits.save()
    assert torch.equal(keys, own)
    assert queries.shape == keys.shape
    assert torch.equal(pattern > 0, seen)
    assert scores.shape == pattern.shape
    assert torch.equal(logits, logits_of(bare(shape), shape, image(shape)))


def test_collect_has_no_order():
    one, encoding = model("e2b"), everything("e2b")
    asked = [path for path in paths(one, encoding) if path.startswith(MEDIA)]
    backwards = one.collect(encoding, asked[::-1])
    with torch.no_grad(), one.trace(**encoding):
        found = one.record(asked)
    assert all(torch.equal(backwards[path], found[path]) for path in asked)


@pytest.mark.parametrize("shape", ["e2b", "12b"])
def test_verbs_edit_the_text_model_alone(shape):
    one, encoding = model(shape), image(shape)
    elsewhere = ["vision.layers[0].layer_output", "vision.tower_output", "vision.image_features"]
    elsewhere += ["model.vision.layers[0].mlp.mlp_output", "vision.layers.*.layer_output"]
    elsewhere += ["audio.layers[0].self_attn.attention_output", "projector.soft_tokens"]
    for at in elsewhere:
        with pytest.raises(
            BadArgument, match=f"steer edits values of the text .* and {re.escape(at)} is none"
        ):
            with one.trace(**encoding):
                one.steer(0, torch.ones(one.hidden_size), at=at)
        with pytest.raises(BadArgument, match=r"intervene edits values of the text .*\n    model\."):
            with one.trace(**encoding):
                one.intervene(0, torch.zeros_like, at=at)
    if shape in TOWERS:
        at = one.vision.layers[0].layer_output  # outside a trace a reference
        with pytest.raises(BadArgument, match="is none"):
            with one.trace(**encoding):
                one.intervene(0, torch.zeros_like, at=at)
    plain = logits_of(bare(shape), shape, encoding)
    for at in ("layer_output", "layers[1].layer_output", "model.layers.*.layer_output"):
        with torch.no_grad(), one.trace(**encoding):
            told = one.intervene(1, torch.zeros_like, at=at)
            stream = one.layers[1].layer_output.save()
        assert told.counts == {1: int(encoding["attention_mask"].sum())}
        assert bool((stream[encoding["attention_mask"].bool()] == 0).all())
    with torch.no_grad(), one.trace(**encoding):
        logits = one.logits.save()
    assert torch.equal(logits, plain)


# ---- after an error ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])
def test_nothing_is_left_of_a_trace_that_failed(shape):
    one, encoding = model(shape), everything(shape)
    wanted = logits_of(bare(shape), shape, encoding)
    hooks = {name: dict(part._forward_hooks) for name, part in one._module.named_modules()}

    def same() -> None:
        with torch.no_grad(), one.trace(**encoding):
            features = one.vision.image_features.save()
            logits = one.logits.save()
        assert torch.equal(logits, wanted)
        assert len(features) == 20

    with pytest.raises(ZeroDivisionError):
        with one.trace(**encoding):
            one.vision.tower_output[:] = 0
            1 / 0
    same()
    with pytest.raises(ZeroDivisionError):
        with one.trace() as tracer:
            with tracer.invoke(**encoding):
                one.vision.image_features[:] = 0
            with tracer.invoke(**text([2, *mark("image", 2)]), **pictures(shape, (2, 1))):
                one.vision.patch_embeddings[:] = 0
                1 / 0
    same()
    # In the model: at the tower's first module, and behind its last.
    if shape in TOWERS:
        refuse = one.vision.patch_embed._module.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            with one.trace(**encoding):
                one.vision.layers[0].layer_output.save()
        refuse.remove()
        same()
    handle = one.projector._module.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        with one.trace(**encoding):
            one.vision.tower_output[:] = 0
            one.vision.image_features.save()
    handle.remove()
    same()
    assert {name: dict(part._forward_hooks) for name, part in one._module.named_modules()} == hooks
