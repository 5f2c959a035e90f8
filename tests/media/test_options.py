"""What a trace says beside its media; what a capture and a kept edit say of values of the prompt alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from gemloupe.errors import BadArgument, StepsWarning
from gemloupe.testing import tiny, tiny_image, tiny_video
from tests.media.given import with_video

PROMPT = "A photo: <|image|>"


@cache
def model() -> Any:
    return tiny("31b", wrapper=True)


def shape_of(value: str, prompt: str = PROMPT, **given: Any) -> torch.Size:
    return model().collect(prompt, value, **given)[value].shape


def test_the_processor_s_options_go_to_the_processor():
    image = tiny_image(100, 80)
    few, many = (
        shape_of("vision.patch_mask", images=[image], max_soft_tokens=budget) for budget in (70, 140)
    )
    assert many[1] == 2 * few[1]


@with_video
def test_a_video_s_times_go_to_the_processor():
    written = model().processor(
        text="<|video|>", videos=[tiny_video(3)], video_metadata={"fps": 1.0}, return_tensors="pt"
    )
    with torch.no_grad(), model().trace("<|video|>", videos=[tiny_video(3)], video_metadata={"fps": 1.0}):
        ids = model().input_ids.save()
    assert torch.equal(ids, written["input_ids"])


def test_another_keyword_is_still_refused():
    with pytest.raises(BadArgument, match="no argument `max_soft_token`"):
        with model().trace(PROMPT, images=[tiny_image()], max_soft_token=140):
            model().logits.save()


def test_a_prompt_given_twice_is_refused():
    with pytest.raises(BadArgument, match="given twice"):
        with model().trace(PROMPT, text=PROMPT, images=[tiny_image()]):
            model().logits.save()


def test_a_capture_says_what_was_asked_for_whether_or_not_it_was_computed():
    found = model().collect("no image", ["logits", "vision.tower_output"])
    assert "logits" in found
    assert "vision.tower_output" in found
    assert "raw_logits" not in found


def test_a_kept_edit_of_a_tower_is_complete_in_the_first_step(recwarn):
    with model().edit() as (_tracer, edited):
        edited.vision.layers[0].mlp.mlp_output[:] = 0
    with torch.no_grad(), edited.generate(PROMPT, images=[tiny_image()], max_new_tokens=3) as tracer:
        tracer.result.save()
    assert not [each for each in recwarn if issubclass(each.category, StepsWarning)]
