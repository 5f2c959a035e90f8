"""What a tower computes more than once in a run: of images and then of video, and in steps."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch

from gemloupe.errors import BadArgument, StepsWarning
from gemloupe.testing import tiny, tiny_image
from tests.media.by_hand import films, pictures, token_id
from tests.media.given import with_video

SHAPE = "31b"


@cache
def model() -> Any:
    return tiny(SHAPE, wrapper=True)


def invoke(kind: str, *lengths: int, **media: torch.Tensor) -> dict[str, torch.Tensor]:
    row = [2, 60]
    for length in lengths:
        row += [*[token_id(kind)] * length, 61]
    return {"input_ids": torch.tensor([row]), **media}


def image(seed: int) -> dict[str, torch.Tensor]:
    return invoke("image", 4, **pictures(SHAPE, (2, 2), seed=seed))


def film() -> dict[str, torch.Tensor]:
    return invoke("video", 2, 2, **films(SHAPE, (2, 2, 1)))


def both() -> dict[str, torch.Tensor]:
    ids = torch.cat([image(1)["input_ids"], film()["input_ids"][:, 1:]], 1)
    return {**image(1), **film(), "input_ids": ids}


@with_video
def test_a_cache_keeps_each_invoke_s_own_rows_of_images_and_of_video():
    one, kept = model(), []
    with torch.no_grad(), one.trace() as tracer:
        for encoding in (film(), image(1), image(2)):
            with tracer.invoke(**encoding):
                kept.append(tracer.cache(modules=[one.vision.layers[1]]).save())
    path = "model.model.vision_tower.encoder.layers.1"
    for encoding, found in zip((film(), image(1), image(2)), kept, strict=True):
        with torch.no_grad(), one.trace(**encoding):
            wanted = one.vision.layers[1].layer_output.save()
        passes = [output for output in found[path].output if len(output)]
        assert len(passes) == 1
        assert torch.allclose(passes[0], wanted, atol=1e-5 * float(wanted.abs().max()))


@with_video
def test_an_edit_that_reaches_images_alone_is_told():
    with pytest.warns(StepsWarning, match="images of this call and not on its video"):
        with torch.no_grad(), model().trace(**both()):
            model().vision.layers[0].layer_output[:] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", StepsWarning)
        with torch.no_grad(), model().trace(**image(1)):
            model().vision.layers[0].layer_output[:] = 0
        with torch.no_grad(), model().trace() as tracer:
            with tracer.invoke(**image(1)):
                model().vision.layers[0].layer_output[:] = 0
            with tracer.invoke(**film()):
                model().vision.layers[0].layer_output[:] = 0


def test_an_edit_of_features_that_a_later_step_undoes_is_told():
    def generate(**options: Any) -> None:
        with torch.no_grad(), model().generate(**image(1), max_new_tokens=3, **options):
            model().vision.image_features[:] = 0

    with pytest.warns(StepsWarning, match="without a cache the features enter the stream anew"):
        generate(use_cache=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StepsWarning)
        generate()


def test_features_are_edited_in_every_step_without_a_cache_whoever_says_so():
    config = model()._module.generation_config
    config.use_cache = False
    try:
        with torch.no_grad(), model().generate(**image(1), max_new_tokens=2) as tracer:
            for _ in tracer.iter[:2]:
                model().vision.image_features[:] = 0
    finally:
        config.use_cache = True


@pytest.mark.parametrize("value", ["vision.image_features", "vision.tower_output"])
def test_a_generation_of_which_tower_values_alone_are_asked_ends(value):
    found = model().collect("<|image|> a", value, images=[tiny_image()], generate=3)
    once = model().collect("<|image|> a", value, images=[tiny_image()])
    assert torch.equal(found[value], once[value])


def test_scan_says_that_it_cannot_count_soft_tokens():
    with pytest.raises(BadArgument, match="scan cannot run images"):
        with model().scan(**image(1)):
            model().vision.image_features.save()


def test_embeddings_beside_an_invoke_with_images_are_refused():
    with pytest.raises(BadArgument, match="embeddings have no place"):
        with model().trace() as tracer:
            with tracer.invoke(**image(1)):
                model().logits.save()
            with tracer.invoke(inputs_embeds=torch.zeros(1, 3, model().hidden_size)):
                model().logits.save()


def test_invokes_with_media_are_padded_on_the_left_whatever_the_tokenizer_does():
    one: Any = tiny(SHAPE, wrapper=True)
    one.tokenizer.padding_side = "right"
    with torch.no_grad(), one.trace() as tracer:
        with tracer.invoke("<|image|>", images=[tiny_image()]):
            mask = one.attention_mask.save()
        with tracer.invoke("<|image|> and a longer text", images=[tiny_image()]):
            one.logits.save()
    assert mask[0, -1] == 1
    assert mask[0, 0] == 0
