"""Generation from a prompt with images, video and sound."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import nnsight
import pytest
import torch
from torch import Tensor

from gemloupe.errors import NeverRan
from gemloupe.testing import SHAPES
from tests.media import hooks
from tests.media.by_hand import pictures, sounds
from tests.media.given import (
    TOWERS,
    WITH_SOUND,
    Encoding,
    bare,
    close,
    everything,
    full,
    mark,
    model,
    soft_tokens,
    text,
)

NEW = 3
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}


@cache
def prompt(shape: str) -> Encoding:
    """Two images in a row, and a sound where the model takes it."""
    tokens = [2, 60, *mark("image", 2), 61, *mark("image", 6), 62]
    media = pictures(shape, (2, 1), (3, 2), patches=28)
    if shape in WITH_SOUND:
        tokens += [*mark("audio", soft_tokens(shape, 13)), 63]
        media |= sounds(shape, 13)
    return text(tokens) | media


@torch.no_grad()
def generated(shape: str, encoding: Encoding) -> Tensor:
    """By the bare module."""
    given = full(shape, encoding)
    del given["position_ids"]
    return bare(shape).generate(**given, **OPTIONS)


@torch.no_grad()
def traced(shape: str, encoding: Encoding, touch: Callable[[Any], None] | None = None) -> Tensor:
    one = model(shape)
    with one.generate(**encoding, **OPTIONS) as tracer:
        if touch is not None:
            touch(one)
        result = tracer.result.save()
    return result


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_the_bare_models(shape):
    for encoding in (prompt(shape), everything(shape)):
        wanted = generated(shape, encoding)
        assert wanted.shape[1] == encoding["input_ids"].shape[1] + NEW
        assert torch.equal(traced(shape, encoding), wanted)


def reading(one: Any) -> None:
    """Reads of the towers, which must change nothing."""
    one.vision.patch_embeddings
    one.vision.tower_output
    one.vision.image_features


@pytest.mark.parametrize("shape", SHAPES)
def test_reads_change_no_token(shape):
    assert torch.equal(traced(shape, prompt(shape), reading), generated(shape, prompt(shape)))


@pytest.mark.parametrize(
    "path", ["vision.image_features", "vision.layers[0].layer_output", "vision.tower_output"]
)
@pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])
def test_an_edit_of_the_prompt_changes_what_follows(shape, path):
    if not model(shape).has(path):
        pytest.skip("12B has no tower")
    steps: list[Tensor] = []

    def change(x: Tensor) -> Tensor:
        steps.append(x)
        return x.flip(-1) * 1.5

    def touch(one: Any) -> None:
        if path.endswith("image_features"):
            one.vision.image_features = change(one.vision.image_features)
        elif path.endswith("tower_output"):
            one.vision.tower_output = change(one.vision.tower_output)
        else:
            one.vision.layers[0].layer_output = change(one.vision.layers[0].layer_output)

    encoding = prompt(shape)
    found = traced(shape, encoding, touch)
    assert len(steps) == 1
    with hooks.edited(bare(shape), path, lambda x: x.flip(-1) * 1.5):
        wanted = generated(shape, encoding)
    assert torch.equal(found, wanted)
    assert not torch.equal(found, generated(shape, encoding))


@pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])
def test_several_invokes_are_as_one_by_one(shape):
    given = [
        prompt(shape),
        text([2, 60, 61, 62, 63]),
        text([2, 65, *mark("image", 4), 66]) | pictures(shape, (2, 2), seed=3, patches=16),
    ]
    alone = [traced(shape, encoding)[0, -NEW:] for encoding in given]
    one = model(shape)
    logits: list[Any] = []
    with torch.no_grad(), one.generate(**OPTIONS) as tracer:
        for encoding in given:
            with tracer.invoke(**encoding):
                logits.append(one.record("logits", positions=-1))
        with tracer.invoke():
            result = tracer.result.save()
    assert [row[-NEW:].tolist() for row in result] == [row.tolist() for row in alone]
    # Each sees its own rows.
    assert all(len(found["logits"]) == 1 for found in logits)


@pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])
def test_an_edit_in_one_invoke_leaves_the_others_tokens(shape):
    given = [prompt(shape), text([2, 65, *mark("image", 4), 66]) | pictures(shape, (2, 2), patches=16)]
    one = model(shape)

    def run(edits: bool) -> Tensor:
        with torch.no_grad(), one.generate(**OPTIONS) as tracer:
            for number, encoding in enumerate(given):
                with tracer.invoke(**encoding):
                    if edits and number == 1:
                        one.vision.image_features[:] = one.vision.image_features.flip(-1) * 2
            with tracer.invoke():
                result = tracer.result.save()
        return result

    plain, changed = run(False), run(True)
    assert torch.equal(plain[0], changed[0])
    assert not torch.equal(plain[1], changed[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tower_runs_in_the_first_step_alone(shape):
    one = model(shape)
    seen: list[int] = []
    with pytest.raises(NeverRan) as told:
        with torch.no_grad(), one.generate(**prompt(shape), **OPTIONS) as tracer:
            for step in tracer.iter[:]:
                seen.append(step)
                one.vision.image_features
    assert seen == [0, 1]
    assert str(told.value) == (
        "vision.image_features: it is computed in the first step of a generation, with the prompt; step 1 "
        "has new tokens and no image.\nRead it in step 0: `if step == 0: ...`, or before the loop."
    )
    features, logits = [], []
    with torch.no_grad(), one.generate(**prompt(shape), **OPTIONS) as tracer:
        for step in tracer.iter[:NEW]:
            if step == 0:
                features.append(one.vision.image_features)
            logits.append(one.logits[:, -1])
    assert (len(features), len(logits)) == (1, NEW)


@pytest.mark.parametrize("shape", SHAPES)
def test_collect_over_a_generation(shape):
    one, encoding = model(shape), prompt(shape)
    asked = ["vision.image_features", "vision.patch_embeddings", "layers[0].layer_input", "logits"]
    asked += ["vision.layers.*.layer_output"] if shape in TOWERS else []
    asked += ["audio.audio_features"] if shape in WITH_SOUND else []
    # In `generate` the vision tower runs before the first forward: no order of what is asked matters.
    asked += ["input_ids", "vision.image_token_mask", "token_embeddings", "vision.patch_mask"]
    found = one.collect(encoding, asked, generate=OPTIONS)
    plain = one.collect(encoding, asked)
    tokens = encoding["input_ids"].shape[1]
    for path in asked:
        if path in ("input_ids", "vision.image_token_mask"):
            assert torch.equal(found[path][:, :tokens], plain[path]), path
            assert found[path].shape[1] == tokens + NEW - 1
        elif path in ("layers[0].layer_input", "logits", "token_embeddings"):
            assert found[path].shape[1] == tokens + NEW - 1
            assert close(found[path][:, :tokens], plain[path]) < 5e-5
        else:
            assert torch.equal(found[path], plain[path]), path
    assert torch.equal(found.input_ids[:, :tokens], encoding["input_ids"])
    assert torch.equal(found.input_ids, generated(shape, encoding)[:, :-1])


@pytest.mark.parametrize("shape", ["31b", "12b"])
def test_a_stored_edit_is_made_on_the_prompt(shape):
    one, encoding = model(shape), prompt(shape)
    with one.edit() as (_, edited):
        edited.vision.image_features = edited.vision.image_features.flip(-1) * 1.5
    with torch.no_grad(), edited.generate(**encoding, **OPTIONS) as tracer:
        found = tracer.result.save()  # nothing is warned of: the first step is where features are
    with hooks.edited(bare(shape), "vision.image_features", lambda x: x.flip(-1) * 1.5):
        assert torch.equal(found, generated(shape, encoding))


def test_words_can_follow_with_a_cache():
    """A second call that is given the first one's cache has no image, and is told so."""
    one, encoding = model("31b"), prompt("31b")
    with torch.no_grad(), one.trace(**encoding, use_cache=True):
        cache = nnsight.save(one.output.past_key_values)
    with torch.no_grad(), pytest.raises(NeverRan, match="this call was given no image"):
        with one.trace(torch.tensor([[70, 71]]), past_key_values=cache):
            one.vision.image_features.save()
