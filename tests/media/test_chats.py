"""Chats that hold images: rendered by the processor's template, whatever task the model was loaded for."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from gemloupe import StandardizedTransformer
from gemloupe.testing import tiny_image, tiny_module, tiny_processor

SHAPES = ("e2b", "31b", "12b")
TASKS = ("text-generation", "image-text-to-text")


@cache
def loaded(shape: str, task: str) -> Any:
    return StandardizedTransformer(
        tiny_module(shape, wrapper=True), processor=tiny_processor(shape), task=task
    )


def chat(*pictures: tuple[int, int], text: str = "what is it?") -> list[dict[str, Any]]:
    images = [{"type": "image", "image": tiny_image(*size)} for size in pictures]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def fed(model: Any, *invokes: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tokens and the image features of each invoke."""
    found = []
    with torch.no_grad(), model.trace() as tracer:
        for invoke in invokes:
            with tracer.invoke(invoke):
                found.append((model.input_ids.save(), model.vision.image_features.save()))
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("task", TASKS)
def test_a_chat_is_what_the_processor_makes_of_it(shape, task):
    model = loaded(shape, task)
    messages = chat((40, 30))
    encoding = model.processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    with torch.no_grad(), model.trace(messages):
        ids, features = model.input_ids.save(), model.vision.image_features.save()
    with torch.no_grad(), model.trace(**encoding):
        wanted = model.vision.image_features.save()
    assert torch.equal(ids, encoding["input_ids"])
    assert torch.equal(features, wanted)


@pytest.mark.parametrize("task", TASKS)
def test_chats_of_several_invokes_keep_their_own_images(task):
    model = loaded("31b", task)
    one, other = chat((40, 30)), chat((30, 60), (50, 20), text="and these?")
    (_, alone), (_, pair) = fed(model, one, other)
    for messages, batched in ((one, alone), (other, pair)):
        ((_, wanted),) = fed(model, messages)
        assert torch.allclose(batched, wanted, atol=1e-5 * float(wanted.abs().max()))
    assert len(pair) != len(alone)


def test_a_chat_that_ends_with_the_model_is_continued():
    model = loaded("31b", "text-generation")
    messages = [*chat((40, 30)), {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}]
    with torch.no_grad(), model.trace(messages):
        ids = model.input_ids.save()
    assert model.tokenizer.decode(ids[0]).endswith("It is")


def test_a_text_chat_needs_no_image():
    model = loaded("31b", "text-generation")
    with torch.no_grad(), model.trace([{"role": "user", "content": "hello"}]):
        ids = model.input_ids.save()
    assert "hello" in model.tokenizer.decode(ids[0])
