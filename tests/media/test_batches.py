"""Several invokes, with images, video, sound, several or none: each as if it ran alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gemloupe.paths import find
from gemloupe.testing import SHAPES
from tests.media.by_hand import films, pictures, sounds
from tests.media.given import (
    TOWERS,
    VIDEO,
    WITH_SOUND,
    Encoding,
    axes,
    close,
    mark,
    model,
    paths,
    soft_tokens,
    text,
    with_video,
)

ALIKE = 5e-5  # other shapes, other roundings; a per-layer branch is normed, which magnifies them

# An edit of a tower in an invoke with images and video, which is told that it reaches the images alone.
images_alone = pytest.mark.filterwarnings(
    "ignore:the edit of .* made on the images:gemloupe.errors.StepsWarning"
)


def row(tokens: list[int], **media: Tensor) -> Encoding:
    return {"input_ids": torch.tensor([tokens]), **media}


def invokes(shape: str) -> list[Encoding]:
    """One with an image, one with two of other sizes, one of words, video, both, and sound."""
    found = [
        row([2, 60, *mark("image", 2), 61], **pictures(shape, (2, 1), patches=12, seed=1)),
        row(
            [2, 60, 61, 62, *mark("image", 6), 61, *mark("image", 4), 66, 67],
            **pictures(shape, (3, 2), (2, 2), seed=2, patches=32),
        ),
        row([2, 60, 61, 62]),
        row([2, 60, 61, 65, 66]),
        row([2, 60, *mark("image", 2), 61, 60], **pictures(shape, (1, 2), seed=4)),
    ]
    if VIDEO:
        found[3] = row([2, 60, *mark("video", 2), 60, *mark("video", 2), 65, 66], **films(shape, (2, 2, 1)))
        found[4] = row(
            [2, 60, *mark("image", 2), 61, *mark("video", 2), 60],
            **pictures(shape, (1, 2), seed=4),
            **films(shape, (1, 2, 1), patches=24),
        )
    if shape in WITH_SOUND:
        sound = mark("audio", soft_tokens(shape, 9))
        image = pictures(shape, (1, 1), seed=5, patches=4)
        found += [
            row([2, 70, *mark("audio", soft_tokens(shape, 21)), 71], **sounds(shape, 21)),
            row([2, *mark("image", 1), *sound, 72], **image, **sounds(shape, 9, seed=1)),
        ]
    return found


@cache
def alone(shape: str, attention: str | None = None) -> list[Any]:
    one, found = model(shape, attention), []
    with torch.no_grad():
        for encoding in invokes(shape):
            with one.trace(**encoding):
                found.append(one.record(paths(one, encoding)))
    return found


@cache
def together(shape: str, attention: str | None = None) -> list[Any]:
    one, found = model(shape, attention), []
    with torch.no_grad(), one.trace() as tracer:
        for encoding in invokes(shape):
            with tracer.invoke(**encoding):
                found.append(one.record(paths(one, encoding)))
    return found


def cut(one: Any, path: str, value: Tensor, like: Tensor, tokens: int) -> Tensor:
    """Without the padding of the batch: words on the left, patches and frames on the right."""
    found = axes(one, path)
    for axis, name in enumerate(found):
        if found[0] == "batch" and name in ("seq", "query", "key"):
            value = value.narrow(axis, value.shape[axis] - tokens, tokens)
        elif found[0] in ("images", "audios") and name in ("patches", "frames", "query", "key"):
            value = value.narrow(axis, 0, like.shape[axis])
    return value


@pytest.mark.parametrize(
    ("shape", "attention"), [*((shape, None) for shape in SHAPES), ("e2b", "eager"), ("31b", "eager")]
)
def test_every_value_is_as_if_alone(shape, attention):
    one = model(shape, attention)
    for number, encoding in enumerate(invokes(shape)):
        mine, theirs = alone(shape, attention)[number], together(shape, attention)[number]
        assert paths(one, encoding)
        for path in paths(one, encoding):
            wanted = mine[path]
            found = cut(one, path, theirs[path], wanted, encoding["input_ids"].shape[1])
            assert found.shape == wanted.shape, (number, path)
            if path.endswith(("expert_indices", "expert_outputs")):
                continue  # near ties change places
            if not wanted.is_floating_point():
                assert torch.equal(found, wanted), (number, path)
                continue
            finite = wanted > -1e30
            assert close(found[finite], wanted[finite]) < ALIKE, (number, path)


# ---- edits -------------------------------------------------------------------------------------------------


def run(shape: str, edit: Any = None, invoke: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    """Every invoke's logits, and the features of those that have an image."""
    one = model(shape)
    logits: list[Tensor] = []
    features: list[Any] = []
    with torch.no_grad(), one.trace() as tracer:
        for number, encoding in enumerate(invokes(shape)):
            with tracer.invoke(**encoding):
                if "pixel_values" in encoding:
                    features.append(one.record("vision.image_features"))
                if edit is not None and number == invoke:
                    edit(one)
                logits.append(one.logits)
    return logits, [found["vision.image_features"] for found in features]


HALVED = (
    "vision.image_features",
    "vision.tower_output",
    "vision.patch_embeddings",
    "projector.soft_tokens",
    "vision.layers[0].layer_output",
    "vision.layers[0].mid_stream",
    "vision.layers[0].mlp.mlp_neurons",
    "vision.layers[0].self_attn.own_values",
    "vision.layers[0].self_attn.attention_values",
    "vision.layers[0].self_attn.attention_scores",
    "vision.layers[0].self_attn.attention_probabilities",
    "vision.layers[0].self_attn.attention_head_outputs",
    "audio.audio_features",
    "audio.tower_output",
    "audio.layers[0].layer_output",
    "audio.layers[1].feed_forward1.mlp_output",
    "audio.layers[1].self_attn.attention_output",
    "audio.layers[1].lconv1d.convolution_output",
    "layers[2].layer_output",
)


def half_of_it(path: str) -> Any:
    """Halves the second half of a value along its last axis, in place."""
    host, _, name = path.rpartition(".")

    def edit(one: Any) -> None:
        value = getattr(find(one, host)[0], name)
        value[..., value.shape[-1] // 2 :] *= 0.5

    return edit


def padded_to_one_number(shape: str) -> int:
    """Patches of an image in the joined batch of `invokes`."""
    return max(e["pixel_values"].shape[1] for e in invokes(shape) if "pixel_values" in e)


@pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])
def test_an_edit_in_one_invoke_moves_no_bit_of_the_others(shape):
    plain, before = run(shape)
    pictured = [number for number, encoding in enumerate(invokes(shape)) if "pixel_values" in encoding]
    for path in HALVED:
        if not model(shape).has(path):
            continue
        for invoke in (5, 6) if path.startswith("audio") else (1,):
            logits, features = run(shape, half_of_it(path), invoke)
            moved = [not torch.equal(now, then) for now, then in zip(logits, plain, strict=True)]
            assert moved == [number == invoke for number in range(len(plain))], path
            moved = [not torch.equal(now, then) for now, then in zip(features, before, strict=True)]
            seen = path.startswith(("vision", "projector"))
            assert moved == [seen and number == invoke for number in pictured], path


@images_alone
@pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])
def test_an_edit_in_a_batch_is_the_edit_alone(shape):
    """Also of video, whose frames are the tower's second pass where another invoke brings images."""
    one, given = model(shape), invokes(shape)
    path = "vision.patch_embeddings" if shape == "12b" else "vision.layers[1].layer_output"
    host, _, name = path.rpartition(".")
    of_video = [(3, "video_features")] if VIDEO else []
    for number, features in (*of_video, (1, "image_features"), (4, "image_features")):

        def edit(features: str = features) -> Any:
            value = getattr(find(one, host)[0], name)
            value[:, :4] = value[:, :4].flip(1) * 1.5
            return getattr(one.vision, features).clone()

        with torch.no_grad():
            with one.trace(**given[number]):
                wanted = edit().save()
                logits = one.logits.save()
            found = []
            with one.trace() as tracer:
                for place, encoding in enumerate(given):
                    with tracer.invoke(**encoding):
                        if place == number:
                            found.append(edit())
                            found.append(one.logits[:, -encoding["input_ids"].shape[1] :])
        assert close(found[0], wanted) < ALIKE
        assert close(found[1], logits) < ALIKE


@with_video
@pytest.mark.parametrize("path", ["attention_head_outputs", "own_values", "attention_values", "own_keys"])
@pytest.mark.parametrize("shape", ["e2b", "31b"])
def test_the_first_thing_that_an_invoke_with_video_asks_for(shape, path):
    """The tower's second pass, where another invoke brings images: by whatever value of a block."""
    one, given = model(shape), invokes(shape)
    for style in ("read", "written"):
        found: list[Any] = []
        with torch.no_grad(), one.trace() as tracer:
            for number, encoding in enumerate(given):
                with tracer.invoke(**encoding):
                    if number == 3:
                        host = one.vision.layers[1].self_attn
                        if style == "written":
                            changed = getattr(host, path) * 0.5
                            setattr(host, path, changed)
                            if path == "own_keys":
                                assert torch.equal(host.own_values, host.own_values)
                                assert torch.equal(host.own_keys, changed)
                        else:
                            found.append(getattr(host, path))
                        found.append(one.vision.video_features)
        wanted = alone(shape)[3]
        if style == "read":
            at = f"vision.layers[1].self_attn.{path}"
            cut_down = cut(one, at, found[0], wanted[at], given[3]["input_ids"].shape[1])
            if path.startswith("own"):  # along `seq`, which is `patches` here
                cut_down = cut_down[:, :, : wanted[at].shape[2]]
            assert close(cut_down, wanted[at]) < ALIKE
            assert close(found[1], wanted["vision.video_features"]) < ALIKE
        else:
            assert not torch.equal(found[0], wanted["vision.video_features"])


@images_alone
@pytest.mark.parametrize("name", ["attention_probabilities", "attention_scores", "attention_values"])
@pytest.mark.parametrize("shape", ["e2b", "31b"])
def test_every_invoke_edits_the_same_attention(shape, name):
    one, given = model(shape), invokes(shape)
    numbers = [number for number, encoding in enumerate(given) if "pixel_values" in encoding]
    wanted: list[Tensor] = []
    for number in numbers:
        with torch.no_grad(), one.trace(**given[number]):
            value = getattr(one.vision.layers[0].self_attn, name)
            value[..., ::2] *= 0.25 + 0.25 * number
            wanted.append(one.vision.image_features)
    found: list[Tensor] = []
    with torch.no_grad(), one.trace() as tracer:
        for number in numbers:
            with tracer.invoke(**given[number]):
                value = getattr(one.vision.layers[0].self_attn, name)
                value[..., ::2] *= 0.25 + 0.25 * number
                found.append(one.vision.image_features)
    for mine, theirs, number in zip(found, wanted, numbers, strict=True):
        assert close(mine, theirs) < ALIKE, number
        plain = alone(shape)[number]["vision.image_features"]
        assert (close(theirs, plain) > 1e-2) == (number != 3), number


# ---- where an axis of images looks like one of rows --------------------------------------------------------


@pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])
def test_as_many_images_as_invokes(shape):
    """Two invokes, two images, both of the second: the batch's first row has none."""
    one = model(shape)
    words = row([2, 60, 61])
    both = row([2, *mark("image", 2), 60, *mark("image", 4), 61], **pictures(shape, (2, 1), (2, 2)))
    with torch.no_grad():
        with one.trace(**both):
            patches = one.vision.patch_embeddings.save()
            features = one.vision.image_features.save()
        for order in ((words, both), (both, words), (words, both, row([2, 3]))):
            found = []
            with one.trace() as tracer:
                for encoding in order:
                    with tracer.invoke(**encoding):
                        if encoding is both:
                            found.append(one.vision.patch_mask)
                            found.append(one.vision.patch_embeddings)
                            found.append(one.vision.image_features)
            assert found[1].shape == patches.shape
            assert found[0].shape == patches.shape[:2]
            assert close(found[1], patches) < ALIKE
            assert close(found[2], features) < ALIKE


@pytest.mark.parametrize("shape", TOWERS)
def test_native_names_are_cut_to_the_invoke(shape):
    one, given = model(shape), invokes(shape)
    for number in (0, 1, 4):
        found: list[Any] = []
        heard: list[Any] = []
        with torch.no_grad(), one.trace() as tracer:
            for place, encoding in enumerate(given):
                with tracer.invoke(**encoding):
                    if place == number:
                        found.append(one.embed_tokens.output)
                        found.append(one.vision.patch_embedder.output)
                        found.append(one.vision.layers[0].output)
                        found.append(one.vision.encoder.output.last_hidden_state)
                        found.append(one.vision.output.last_hidden_state)
                        found.append(one.projector.input)
                        found.append(one.projector.output)
                    elif "input_features" in encoding:
                        heard.append(one.audio.output.last_hidden_state)
        images = len(given[number]["pixel_values"])
        tokens = int((given[number]["input_ids"] == mark("image", 1)[0]).sum())
        wide = padded_to_one_number(shape)
        hidden = one.plan.vision.hidden_size
        words, *found = found
        assert len(words) == 1
        assert [len(value) for value in heard] == ([1, 1] if shape in WITH_SOUND else [])
        assert [tuple(value.shape) for value in found[:3]] == [(images, wide, hidden)] * 3
        assert [tuple(value.shape) for value in found[3:6]] == [
            (tokens, hidden),
            (tokens, hidden),
            (tokens, one.hidden_size),
        ]
        values = together(shape)[number]
        assert torch.equal(found[1], values["vision.layers[0].layer_output"])
        assert torch.equal(found[2], values["vision.tower_output"])
        assert torch.equal(found[4], values["projector.soft_tokens"])
        assert torch.equal(found[5], values["vision.image_features"])


def test_the_call_s_own_arguments_are_cut_to_the_invoke():
    one, given = model("e2b"), invokes("e2b")
    videos = ["pixel_values_videos"] if VIDEO else []
    found: list[Any] = []
    with torch.no_grad(), one.trace() as tracer:
        for encoding in given:
            with tracer.invoke(**encoding):
                found.append(one.inputs[1])
    for number, (kwargs, encoding) in enumerate(zip(found, given, strict=True)):
        assert len(kwargs["input_ids"]) == 1, number
        for name in ("pixel_values", "image_position_ids", *videos, "input_features"):
            mine = encoding.get(name)
            assert len(kwargs[name]) == (0 if mine is None else len(mine)), (number, name)
            if mine is not None:
                assert torch.equal(kwargs[name][:, : mine.shape[1]], mine)


# ---- other ways to write a batch ---------------------------------------------------------------------------


def test_an_invoke_without_input_sees_the_whole_batch():
    one, given = model("31b"), invokes("31b")
    with torch.no_grad(), one.trace() as tracer:
        for encoding in given:
            with tracer.invoke(**encoding):
                pass
        with tracer.invoke():
            mask = one.vision.patch_mask.save()
            features = one.vision.image_features.save()
            logits = one.logits.save()
    images = sum(len(e["pixel_values"]) for e in given if "pixel_values" in e)
    assert len(mask) == images
    assert torch.equal(features, torch.cat([together("31b")[i]["vision.image_features"] for i in (0, 1, 4)]))
    assert len(logits) == len(given)


def test_a_barrier_carries_features_from_one_invoke_to_another():
    one = model("31b")
    first = row([2, *mark("image", 4), 61], **pictures("31b", (2, 2), seed=1))
    second = row([2, 60, *mark("image", 4), 61], **pictures("31b", (2, 2), seed=2))
    with torch.no_grad():
        with one.trace(**first):
            wanted = one.vision.image_features.save()
        with one.trace() as tracer:
            meet = tracer.barrier(2)
            with tracer.invoke(**first):
                features = one.vision.image_features
                meet()
            with tracer.invoke(**second):
                meet()
                one.vision.image_features = features.clone()
                mask = one.layers[0].layer_input.save()
    assert close(mask[0, 2:6], wanted) < ALIKE


def test_a_stored_edit_is_made_in_every_invoke():
    one, given = model("31b"), invokes("31b")[:2]
    with one.edit() as (_, edited):
        edited.vision.image_features[:] = 0
    found: list[Any] = []
    with torch.no_grad(), edited.trace() as tracer:
        for encoding in given:
            with tracer.invoke(**encoding):
                found.append(edited.layers[0].layer_input)
    for value, encoding in zip(found, given, strict=True):
        tokens = encoding["input_ids"].shape[1]
        placeholders = encoding["input_ids"] == mark("image", 1)[0]
        assert bool((value[:, -tokens:][placeholders] == 0).all())
        assert not bool((value[:, -tokens:][~placeholders] == 0).any())


@pytest.mark.parametrize("shape", SHAPES)
def test_words_alone_are_as_before(shape):
    one = model(shape)
    with torch.no_grad():
        with one.trace(**text([2, 60, 61, 62], [2, 70])):
            whole = one.logits.save()
        found: list[Any] = []
        with one.trace() as tracer:
            for tokens in ([2, 60, 61, 62], [2, 70]):
                with tracer.invoke(torch.tensor([tokens])):
                    found.append(one.logits)
    assert torch.equal(torch.cat(list(found)), whole)


def test_collect_of_one_call_with_media_is_record():
    one, encoding = model("31b"), invokes("31b")[4]
    asked = ["vision.layers.*.layer_output", "layers[2].layer_output", "vision.image_features"]
    found = one.collect(encoding, asked)
    for path in ("vision.layers[1].layer_output", "layers[2].layer_output", "vision.image_features"):
        assert torch.equal(found[path], alone("31b")[4][path])
    assert found["vision.layers.*.layer_output"].shape[:2] == (2, 1)
    assert found.blocks("vision.layers.*.layer_output") == [0, 1]
