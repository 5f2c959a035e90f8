"""Loading a model with its processor: found, composed, checked, adopted by nnsight."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gemloupe import StandardizedTransformer, processors
from gemloupe.composed import ComposedProcessor, compose
from gemloupe.errors import BadArgument, LoadError
from gemloupe.processors import check_processor, find_processor
from gemloupe.testing import (
    save_tiny,
    tiny,
    tiny_config,
    tiny_image,
    tiny_module,
    tiny_processor,
    tiny_sound,
    tiny_tokenizer,
)

SHAPES = ("e2b", "26b-a4b", "12b")
every_shape = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Any:
    @cache
    def save(shape: str, wrapper: bool = True) -> Path:
        return save_tiny(tmp_path_factory.mktemp("model") / shape, shape, wrapper=wrapper)

    return save


def expected(shape: str, **given: Any) -> torch.Tensor:
    """What the bare module answers to what the processor makes."""
    with torch.no_grad():
        return tiny_module(shape, wrapper=True)(**tiny_processor(shape)(**given, return_tensors="pt")).logits


def traced(model: Any, text: str, **media: Any) -> torch.Tensor:
    with torch.no_grad():
        with model.trace(text, **media):
            logits = model.logits.save()
    return logits


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(LoadError) as caught:
        StandardizedTransformer(*args, **kwargs)
    return str(caught.value)


@every_shape
@pytest.mark.parametrize("task", processors.MULTIMODAL)
def test_a_directory_with_its_processor(shape, task, saved):
    model: Any = StandardizedTransformer(saved(shape), task=task)
    assert isinstance(model.processor, ComposedProcessor)
    assert model.processor.to_dict() == tiny_processor(shape).to_dict()
    assert model.processor.chat_template == tiny_tokenizer().chat_template
    assert model.tokenizer is model.processor.tokenizer
    assert model.tokenizer.padding_side == "left"
    # nnsight pads texts on the side of a feature extractor, where it has one.
    assert model.feature_extractor is None
    given = {"text": "a <|image|> b", "images": [tiny_image()]}
    answer = traced(model, given["text"], images=given["images"])
    assert (answer - expected(shape, **given)).abs().max() < 1e-4


@every_shape
def test_a_loaded_module_finds_the_processor_beside_it(shape, saved):
    module = transformers.AutoModelForImageTextToText.from_pretrained(saved(shape))
    model: Any = StandardizedTransformer(module, task="image-text-to-text")
    assert isinstance(model.processor, ComposedProcessor)
    given = {"text": "<|image|>", "images": [tiny_image()]}
    assert (traced(model, "<|image|>", images=[tiny_image()]) - expected(shape, **given)).abs().max() < 1e-4


@every_shape
@pytest.mark.parametrize("form", ["object", "directory"])
def test_a_processor_given_with_the_default_task(shape, form, saved):
    processor = tiny_processor(shape) if form == "object" else saved(shape)
    model: Any = StandardizedTransformer(tiny_module(shape, wrapper=True), processor=processor)
    assert model.task == "text-generation"
    assert model.tokenizer is model.processor.tokenizer
    given = {"text": "a <|image|>", "images": [tiny_image()]}
    assert torch.equal(traced(model, "a <|image|>", images=[tiny_image()]), expected(shape, **given))
    # Text alone is text, as without a processor.
    with_processor, without = traced(model, "a cat"), traced(tiny(shape), "a cat")
    assert (with_processor - without).abs().max() < 1e-4


@pytest.mark.parametrize("shape", ["e2b", "12b"])
def test_sound(shape, saved):
    model: Any = StandardizedTransformer(saved(shape), task="any-to-any")
    answer = traced(model, "a <|audio|>", audio=[tiny_sound()])
    same = expected(shape, text="a <|audio|>", audio=[tiny_sound()])
    assert (answer - same).abs().max() < 1e-4


def test_generation_chats_and_batches_of_text(saved):
    model: Any = StandardizedTransformer(saved("e2b"), task="image-text-to-text")
    with model.generate("<|image|>", images=[tiny_image()], max_new_tokens=2, min_new_tokens=2) as tracer:
        ids = tracer.result.save()
    assert (
        ids.shape[1]
        == tiny_processor("e2b")(images=tiny_image(), return_tensors="pt")["input_ids"].shape[1] + 2
    )
    content = [{"type": "image", "image": tiny_image()}, {"type": "text", "text": "What?"}]
    with model.trace([{"role": "user", "content": content}]):
        chat = model.input_ids.save()
    text = "<bos><|turn>user\n<|image|>What?<turn|>\n<|turn>model\n"
    same = tiny_processor("e2b")(
        text=text, images=tiny_image(), add_special_tokens=False, return_tensors="pt"
    )
    assert torch.equal(chat, same["input_ids"])
    with model.trace(["a", "abc"]):
        mask = model.attention_mask.save()
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_the_default_task_loads_no_processor(saved):
    model: Any = StandardizedTransformer(saved("e2b"))
    assert (model.processor, model.task) == (None, "text-generation")


def test_settings_of_the_older_kind(saved, tmp_path):
    """Images alone, in a file of their own."""
    import shutil

    path = Path(shutil.copytree(saved("12b"), tmp_path / "old"))
    settings = json.loads((path / "processor_config.json").read_text())
    (path / "processor_config.json").unlink()
    (path / "preprocessor_config.json").write_text(json.dumps(settings["image_processor"]))
    found = find_processor(path, tiny_config("12b", wrapper=True))
    assert found.image_processor.patch_size == 8
    assert found.feature_extractor is None
    (path / "preprocessor_config.json").unlink()
    assert re.match(
        rf"{path} has no processor that loads; give `processor=", refusal(path, task="any-to-any")
    )


# -- with torchvision ----------------------------------------------------------------------------------------


def test_with_torchvision_transformers_own_is_loaded(saved, monkeypatch):
    monkeypatch.setattr(processors, "find_spec", lambda name: object())
    asked = []

    def load(name: str, **kwargs: Any) -> str:
        asked.append((name, kwargs))
        return "theirs"

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", load)
    config = tiny_config("e2b", wrapper=True)
    assert find_processor(saved("e2b"), config, revision="a", trust_remote_code=True) == "theirs"
    assert asked == [(str(saved("e2b")), {"revision": "a", "trust_remote_code": True})]
    assert processors.pipeline_task("any-to-any") == "any-to-any"


def test_without_torchvision_another_pipeline_stands_in():
    assert processors.pipeline_task("any-to-any") == "image-text-to-text"
    assert processors.pipeline_task("image-text-to-text") == "image-text-to-text"
    assert processors.pipeline_task(None) == "text-generation"
    assert processors.pipeline_task("text-generation") == "text-generation"


# -- refusals ------------------------------------------------------------------------------------------------


@every_shape
def test_a_text_model_has_no_processor(shape, saved):
    text = refusal(saved(shape, wrapper=False), task="image-text-to-text")
    family = "gemma4_unified" if shape == "12b" else "gemma4"
    assert text.startswith('task="image-text-to-text" is for a model that takes images')
    assert f"the text model alone ({family}_text)" in text
    assert f"whose config is a {family}: a published repo, or a *ForConditionalGeneration" in text
    assert refusal(tiny_module(shape), processor=tiny_processor(shape)).startswith("`processor=` is for")


def test_a_module_made_in_memory():
    text = refusal(tiny_module("e2b", wrapper=True), task="image-text-to-text")
    assert "not loaded from a directory or repo id, so no processor lies beside it" in text
    assert "`processor=AutoProcessor.from_pretrained(...)`" in text


def test_without_pillow(saved, monkeypatch):
    monkeypatch.setattr(processors, "find_spec", lambda name: None)
    assert "`pip install gemloupe[vision]`" in refusal(saved("e2b"), task="image-text-to-text")


def changed(shape: str, part: str, **settings: Any) -> ComposedProcessor:
    whole = tiny_processor(shape).to_dict()
    whole[part] |= settings
    return compose(whole, tiny_tokenizer())


@every_shape
@pytest.mark.parametrize(
    ("part", "settings", "messages"),
    [
        (
            "image_processor",
            {"patch_size": 16},
            {
                "12b": "its patches are 32 x 32 pixels, the model's 8 x 8",
                "": "16 x 16 pixels, the model's 4 x 4",
            },
        ),
        (
            "image_processor",
            {"pooling_kernel_size": 3},
            {
                "12b": "its patches are 12 x 12 pixels, the model's 8 x 8",
                "": "it pools 3 x 3 patches into a token, the model 2 x 2",
            },
        ),
        (
            "feature_extractor",
            {"feature_size": 128, "audio_samples_per_token": 128},
            {
                "12b": "its sound has 128 numbers a frame, the model's 20 samples",
                "": "128 numbers a frame, the model's 16 mel bins",
            },
        ),
    ],
    ids=["patch", "pooling", "sound"],
)
def test_another_models_processor(shape, part, settings, messages):
    config = tiny_config(shape, wrapper=True)
    check_processor(tiny_processor(shape), config)
    if part == "feature_extractor" and config.audio_config is None:
        check_processor(changed(shape, part, **settings), config)  # it never hears
        return
    with pytest.raises(LoadError) as caught:
        check_processor(changed(shape, part, **settings), config)
    assert str(caught.value).startswith("the processor is another model's: ")
    assert messages.get(shape, messages[""]) in str(caught.value)


@pytest.mark.parametrize(
    "field", ["image_token_id", "video_token_id", "audio_token_id", "boi_token_id", "boa_token_id"]
)
def test_another_models_tokens(field):
    config = tiny_config("e2b", wrapper=True)
    before = getattr(config, field)
    setattr(config, field, 200)
    with pytest.raises(LoadError, match=rf"is token {before} of its tokenizer, and {field} is 200"):
        check_processor(tiny_processor("e2b"), config)


def test_another_models_vocabulary():
    processor = tiny_processor("e2b")
    processor.tokenizer.add_tokens(["<more>"])
    with pytest.raises(LoadError, match="its tokenizer knows 289 tokens, the model 288"):
        check_processor(processor, tiny_config("e2b", wrapper=True))


def test_the_unified_models_own_merges_its_patches():
    """transformers' class, which torchvision would give: its settings are those before the merge."""
    processor: Any = tiny_processor("12b")

    class Gemma4UnifiedImageProcessor:
        patch_size, pooling_kernel_size = 4, 2

    processor.image_processor = Gemma4UnifiedImageProcessor()
    check_processor(processor, tiny_config("12b", wrapper=True))
    Gemma4UnifiedImageProcessor.patch_size = 8
    with pytest.raises(LoadError, match="its patches are 16 x 16 pixels, the model's 8 x 8"):
        check_processor(processor, tiny_config("12b", wrapper=True))


def test_something_that_is_no_processor():
    with pytest.raises(LoadError, match=r"\w+ has no tokenizer\. Give this"):
        check_processor(tiny_tokenizer(), tiny_config("e2b", wrapper=True))


@pytest.mark.parametrize("keyword", ["images", "videos", "audio"])
@pytest.mark.parametrize("verb", ["trace", "generate", "invoke"])
def test_media_without_a_processor(keyword, verb):
    text: Any = tiny("e2b")
    whole: Any = StandardizedTransformer(tiny_module("e2b", wrapper=True), tokenizer=tiny_tokenizer())
    for model, message in (
        (whole, f"`{keyword}=` is read by a processor, and this model was loaded without one"),
        (text, f"`{keyword}=`: this is the text model alone"),
    ):
        with pytest.raises(BadArgument, match=re.escape(message)) as caught:
            if verb == "invoke":
                with model.trace() as tracer:
                    with tracer.invoke("a", **{keyword: [tiny_image()]}):
                        model.logits.save()
            else:
                with getattr(model, verb)("a", **{keyword: [tiny_image()]}):
                    model.logits.save()
        assert 'task="image-text-to-text"' in str(caught.value)


def test_the_tokenizer_that_is_given_is_the_processors(saved):
    tokenizer = tiny_tokenizer()
    model: Any = StandardizedTransformer(saved("e2b"), task="image-text-to-text", tokenizer=tokenizer)
    assert model.tokenizer is model.processor.tokenizer is tokenizer


def test_a_module_without_a_tokenizer_beside_it(saved, tmp_path):
    (tmp_path / "processor_config.json").write_text((saved("e2b") / "processor_config.json").read_text())
    module = tiny_module("e2b", wrapper=True)
    module.name_or_path = str(tmp_path)
    text = refusal(module, task="image-text-to-text")
    assert text == f"{tmp_path} has no tokenizer, which its processor needs; give `processor=...`."


def test_a_wrapper_without_a_part_for_images_compares_no_images():
    config: Any = tiny_config("e2b", wrapper=True)
    config.vision_config = None
    check_processor(changed("e2b", "image_processor", patch_size=16), config)
