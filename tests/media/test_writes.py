"""A write inside a tower is the same edit by a hook, reaches what it should, or is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from gemloupe.capture import _rank
from gemloupe.errors import BadWrite, ReadOnly
from gemloupe.paths import find
from gemloupe.testing import SHAPES
from tests.media import hooks
from tests.media.by_hand import pictures, sounds
from tests.media.given import (
    TOWERS,
    WITH_SOUND,
    bare,
    close,
    everything,
    full,
    image,
    logits_of,
    mark,
    model,
    paths,
    soft_tokens,
    support,
    text,
)

MIXED = ("attention_scores", "attention_probabilities")


def writable(shape: str, encoding: dict[str, Tensor]) -> list[str]:
    """The values of images and sound that can be written, in the order in which a forward passes them."""
    one = model(shape)
    found = [path for path in paths(one, encoding) if path.startswith(("vision", "projector", "audio"))]
    return sorted((path for path in found if _served(one, path).read_only is None), key=_rank)


def _served(one: Any, path: str) -> Any:
    served = find(one, path)[1]
    assert served is not None
    return served


def read(one: Any, path: str) -> Tensor:
    return getattr(find(one, path)[0], path.rpartition(".")[2])


def put(one: Any, path: str, value: Tensor) -> None:
    setattr(find(one, path)[0], path.rpartition(".")[2], value)


def apart(shape: str) -> dict[str, Tensor]:
    """Two images in one row, words between, and a sound where the model takes it; no video."""
    row = [2, 60, *mark("image", 2), 61, *mark("image", 6), 62]
    media = pictures(shape, (2, 1), (3, 2), patches=28)
    if shape in WITH_SOUND:
        row += [*mark("audio", soft_tokens(shape, 13)), 63]
        media |= sounds(shape, 13)
    return text(row) | media


# ---- identity ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", [None, "eager"], ids=["sdpa", "eager"])
@pytest.mark.parametrize("style", ["assigned", "in place"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_value_written_as_it_was_moves_no_bit(shape, style, attention):
    encoding, one = everything(shape), model(shape, attention)
    names = [path for path in writable(shape, encoding) if not path.endswith(MIXED)]
    assert len(names) >= {"26b-a4b": 30, "31b": 30, "12b": 4}.get(shape, 40)
    with torch.no_grad(), one.trace(**encoding):
        for path in names:
            if style == "assigned":
                put(one, path, read(one, path).clone())
            else:
                value = read(one, path)
                value *= 1
        logits = one.logits.save()
    assert torch.equal(logits, logits_of(bare(shape, attention), shape, encoding))


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("shape", ["e2b", "31b"])
def test_a_pattern_written_as_it_was_moves_roundings_alone(shape, name):
    encoding, one = image(shape), model(shape)
    with torch.no_grad(), one.trace(**encoding):
        host = one.vision.layers[1].self_attn
        setattr(host, name, getattr(host, name).clone())
        logits = one.logits.save()
    real = encoding["attention_mask"].bool()
    assert close(logits[real], logits_of(bare(shape), shape, encoding)[real]) < 1e-5


# ---- edits -------------------------------------------------------------------------------------------------


def other(path: str, seed: int = 0) -> hooks.Edit:
    """A change of every number of a value, another in every place."""

    def change(x: Tensor) -> Tensor:
        random = torch.Generator().manual_seed(seed)
        ramp = 0.5 + torch.rand(x.shape, generator=random, dtype=torch.float32).to(x.dtype)
        return x * ramp

    return change


@pytest.mark.parametrize("style", ["assigned", "in place"])
@pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])
def test_a_changed_write_is_the_edit_by_a_hook(shape, style):
    encoding, one = apart(shape), model(shape)
    plain = logits_of(bare(shape), shape, encoding)
    for path in writable(shape, encoding):
        edit = other(path)
        with torch.no_grad(), one.trace(**encoding):
            if style == "assigned":
                put(one, path, edit(read(one, path)))
            else:
                value = read(one, path)
                value[:] = edit(value)
            logits = one.logits.save()
        with hooks.edited(bare(shape), path, edit):
            wanted = logits_of(bare(shape), shape, encoding)
        assert close(plain, wanted) > 1e-3, path
        if path.endswith((*MIXED, "mid_stream")):
            assert close(logits, wanted) < 2e-5, path
        else:
            assert torch.equal(logits, wanted), path
    assert torch.equal(logits_of(bare(shape), shape, encoding), plain)  # no hook is left


@pytest.mark.parametrize("shape", SHAPES)
def test_one_images_features_leave_the_others_as_they_were(shape):
    encoding, one = apart(shape), model(shape)
    plain = logits_of(bare(shape), shape, encoding)
    with torch.no_grad(), one.trace(**encoding):
        before = one.vision.image_features.clone().save()
        one.vision.image_features[:2] = 0
        entered = one.layers[0].layer_input.save()
        logits = one.logits.save()
    places = encoding["input_ids"] == mark("image", 1)[0]
    assert torch.equal(entered[places][2:], before[2:])
    assert bool((entered[places][:2] == 0).all())
    assert bool((before[:2] != 0).all())
    assert close(logits[:, :2], plain[:, :2]) < 1e-6  # the rows of `grouped_mm` are sorted by expert
    assert all(not torch.equal(logits[:, i], plain[:, i]) for i in range(4, logits.shape[1]))


@pytest.mark.parametrize("shape", SHAPES)
def test_an_image_s_tower_reaches_that_image_alone(shape):
    encoding, one = apart(shape), model(shape)
    path = "vision.layers[0].layer_output" if shape in TOWERS else "vision.patch_embeddings"
    with torch.no_grad():
        with one.trace(**encoding):
            before = one.vision.image_features.save()
        with one.trace(**encoding):
            value = read(one, path)
            value[1] = value[1].flip(0)
            after = one.vision.image_features.save()
    assert torch.equal(after[:2], before[:2])
    assert bool((after[2:] != before[2:]).any(-1).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_padded_patches_reach_nothing(shape):
    encoding, one = apart(shape), model(shape)
    plain = logits_of(bare(shape), shape, encoding)
    real = (encoding["image_position_ids"] != -1).all(-1)
    names = [
        path for path in writable(shape, encoding) if path.endswith(("patch_embeddings", "tower_output"))
    ]
    names += [path for path in writable(shape, encoding) if path.endswith("layers[0].layer_output")]
    for path in names:
        if not path.startswith("vision"):
            continue
        with torch.no_grad(), one.trace(**encoding):
            assert torch.equal(one.vision.patch_mask, real)
            value = read(one, path)
            value[~real] = 7.0
            logits = one.logits.save()
        assert torch.equal(logits, plain), path


@pytest.mark.parametrize("shape", ["e2b", "e4b"])
def test_padded_frames_reach_nothing(shape):
    one = model(shape)
    encoding = text(*[[2, *mark("audio", soft_tokens(shape, n)), 60] for n in (21, 9)]) | sounds(shape, 21, 9)
    plain = logits_of(bare(shape), shape, encoding)
    padded = ~encoding["input_features_mask"][:, ::4]
    assert padded.any()
    for path in ("audio.frame_embeddings", "audio.layers[0].layer_output", "audio.tower_output"):
        with torch.no_grad(), one.trace(**encoding):
            read(one, path)[padded] = 3.0
            logits = one.logits.save()
        assert torch.equal(logits, plain), path


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_are_read_only(shape):
    encoding, one = everything(shape), model(shape)
    names = ["vision.image_token_mask", "vision.video_token_mask", "vision.patch_mask"]
    names += ["audio.audio_token_mask", "audio.frame_mask"] if shape in WITH_SOUND else []
    names += ["vision.layers[1].self_attn.visible_keys"] if shape in TOWERS else []
    names += ["layers[1].self_attn.visible_keys"]
    for path in names:
        assert not support(one)[path.replace("[1]", "[i]")].writable
        with pytest.raises(ReadOnly, match=re.escape(f"{path} cannot be written: ")):
            with one.trace(**encoding):
                put(one, path, torch.zeros(2, 2, dtype=torch.bool))
        if path.endswith("visible_keys"):
            continue  # torch refuses an edit of it in place: its heads are one
        with pytest.raises(ReadOnly, match=re.escape(f"{path} cannot be edited: ")):
            with one.trace(**encoding):
                value = read(one, path)
                value[:] = False
                one.logits.save()
    with torch.no_grad(), one.trace(**encoding):
        logits = one.logits.save()
    assert torch.equal(logits, logits_of(bare(shape), shape, encoding))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_does_not_fit_is_refused(shape):
    encoding, one = image(shape), model(shape)
    for path in ("vision.image_features", "vision.patch_embeddings", "vision.tower_output"):
        with pytest.raises(BadWrite, match=r"vision\.\w+ has shape \(\d+(, \d+)*\) \[image"):
            with one.trace(**encoding):
                put(one, path, read(one, path)[:-1])
        with pytest.raises(BadWrite, match=r"is torch\.float32; the write is torch\.float64"):
            with one.trace(**encoding):
                put(one, path, read(one, path).double())
        with pytest.raises(BadWrite, match="takes a tensor of layout"):
            with one.trace(**encoding):
                put(one, path, 0.0)  # pyright: ignore[reportArgumentType]
    assert full(shape, encoding).keys() > encoding.keys()
    with torch.no_grad(), one.trace(**encoding):
        logits = one.logits.save()
    assert torch.equal(logits, logits_of(bare(shape), shape, encoding))


# ---- the attention of the vision tower ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["e2b", "31b"])
def test_a_written_pattern_is_what_the_heads_mix_by(shape):
    encoding, one = image(shape), model(shape)
    real = (encoding["image_position_ids"] != -1).all(-1)
    with torch.no_grad(), one.trace(**encoding):
        host = one.vision.layers[0].self_attn
        values = host.attention_values.clone().save()
        even = real[:, None, None, :] / real.sum(-1)[:, None, None, None]
        host.attention_probabilities[:] = even
        heads = host.attention_head_outputs.save()
    mean = (values * real[:, None, :, None]).sum(2) / real.sum(-1)[:, None, None]
    assert close(heads, mean[:, None].expand_as(heads)) < 1e-6


@pytest.mark.parametrize("attention", [None, "eager"], ids=["sdpa", "eager"])
@pytest.mark.parametrize("name", ["keys", "values"])
def test_keys_and_values_are_private(name, attention):
    """An edit of the copy leaves what the block computed as it was."""
    encoding, one = image("31b"), model("31b", attention)
    with torch.no_grad(), one.trace(**encoding):
        host = one.vision.layers[0].self_attn
        own = getattr(host, f"own_{name}").clone().save()
        held = getattr(host, f"own_{name}").save()
        mine = getattr(host, f"attention_{name}").save()
        mine[:] = 0
        heads = host.attention_head_outputs.save()
    assert torch.equal(own, held)
    if name == "values":
        assert bool((heads == 0).all())
    assert not torch.equal(own, mine)
