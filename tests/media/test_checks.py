"""What does not fit together is refused before anything runs; what does is counted as transformers counts."""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from gemloupe.errors import BadArgument
from gemloupe.media_checks import MediaCount, Span, check_media
from gemloupe.testing import tiny_config, tiny_module
from tests.media.by_hand import films, grid, ids, pictures, sounds, token_id

SHAPES = ("e2b", "31b", "12b")  # two poolings, with and without a tower for sound, and the unified model
HEARING = ("e2b", "12b")
every_shape = pytest.mark.parametrize("shape", SHAPES)
hearing = pytest.mark.parametrize("shape", HEARING)


@cache
def config(shape: str, wrapper: bool = True) -> Any:
    return tiny_config(shape, wrapper=wrapper)


@cache
def module(shape: str) -> Any:
    return tiny_module(shape, wrapper=True)


def refusal(shape: str, **encoding: Any) -> str:
    with pytest.raises(BadArgument) as caught:
        check_media(config(shape), encoding)
    return str(caught.value)


# -- counts: what transformers itself makes of the same tensors ---------------------------------------------


@every_shape
def test_images_are_counted_as_transformers_counts(shape):
    given = pictures(shape, (3, 2), (1, 4), (5, 1))
    count = check_media(config(shape), {"input_ids": ids([6, 4, 5]), **given})
    features = module(shape).model.get_image_features(**given, return_dict=True).pooler_output
    assert count.images == tuple(len(feature) for feature in features) == (6, 4, 5)
    assert count.image_spans == (Span(0, 2, 8), Span(0, 9, 13), Span(0, 14, 19))
    assert count.frames == count.audios == count.videos == count.frame_spans == ()


@every_shape
def test_frames_are_counted_as_transformers_counts(shape):
    given = films(shape, (2, 3, 2), (1, 1, 4))
    count = check_media(config(shape), {"input_ids": ids([6], [6, 4], kind="video"), **given})
    features = module(shape).model.get_video_features(**given, return_dict=True).pooler_output
    assert [len(feature) for feature in features] == [12, 4]
    assert count == MediaCount(
        frames=(6, 6, 4), videos=(2, 1), frame_spans=(Span(0, 7, 13), Span(1, 2, 8), Span(1, 9, 13))
    )


@hearing
def test_sound_is_counted_as_transformers_counts(shape):
    lengths = (17, 5, 8, 1)
    given = sounds(shape, *lengths)
    with torch.no_grad():
        answer = module(shape).model.get_audio_features(**given, return_dict=True)
    heard = tuple(answer.attention_mask.sum(-1).tolist())
    assert heard == (lengths if shape == "12b" else (5, 2, 2, 1))
    count = check_media(config(shape), {"input_ids": ids(list(heard), kind="audio"), **given})
    assert count.audios == heard
    assert [span.stop - span.start for span in count.audio_spans] == list(heard)


@every_shape
def test_images_that_touch_are_told_apart_by_their_counts(shape):
    count = check_media(
        config(shape), {"input_ids": ids([10], [3]), **pictures(shape, (3, 2), (2, 2), (3, 1))}
    )
    assert count.image_spans == (Span(0, 2, 8), Span(0, 8, 12), Span(1, 9, 12))


@every_shape
def test_what_is_checked_runs(shape):
    """The checks refuse nothing that transformers answers rightly."""
    given = {"input_ids": ids([6, 4], [5]), **pictures(shape, (3, 2), (2, 2), (5, 1))}
    check_media(config(shape), given)
    with torch.no_grad():
        assert module(shape)(**given).logits.isfinite().all()


def test_several_kinds_in_one_prompt():
    marks = {kind: token_id(kind) for kind in ("image", "video", "audio")}
    row = [2, *[marks["audio"]] * 2, 60, *[marks["image"]] * 4, 60, *[marks["video"]] * 3]
    count = check_media(
        config("e2b"),
        {
            "input_ids": torch.tensor([row]),
            **pictures("e2b", (2, 2)),
            **films("e2b", (1, 3, 1)),
            **sounds("e2b", 8),
        },
    )
    assert count == MediaCount(
        images=(4,),
        frames=(3,),
        audios=(2,),
        videos=(1,),
        image_spans=(Span(0, 4, 8),),
        frame_spans=(Span(0, 9, 12),),
        audio_spans=(Span(0, 1, 3),),
    )


def test_text_alone_counts_nothing():
    for wrapper in (True, False):
        assert check_media(config("e2b", wrapper), {"input_ids": torch.tensor([[2, 60]])}) == MediaCount()
        assert check_media(config("12b", wrapper), {}) == MediaCount()


# -- placeholders -------------------------------------------------------------------------------------------


@every_shape
def test_another_number_of_placeholders(shape):
    text = refusal(shape, input_ids=ids([6, 3]), **pictures(shape, (3, 2), (2, 2)))
    assert text.startswith("the prompt has 9 image tokens, and what is given makes 10 (6, 4).")
    assert "`trace(text, images=[...])`" in text


@every_shape
def test_images_in_another_order_than_their_placeholders(shape):
    """transformers runs this, and tells nothing."""
    given = {"input_ids": ids([4, 6]), **pictures(shape, (3, 2), (2, 2))}
    with torch.no_grad():
        assert module(shape)(**given).logits.isfinite().all()
    text = refusal(shape, **given)
    assert text.startswith("image 0 would be spread over several places")
    assert "in runs of 4, 6, and the images make 6, 4" in text
    assert "row after row" in text


@every_shape
def test_images_over_two_rows_are_taken_row_after_row(shape):
    assert "image 1 would be spread" in refusal(
        shape, input_ids=ids([6, 2], [4]), **pictures(shape, (3, 2), (2, 2), (2, 1))
    )


def test_a_run_does_not_go_on_in_the_next_row():
    mark = token_id("image")
    tokens = torch.tensor([[2, 60, mark, mark], [mark, mark, 60, 61]])
    assert "image 0 would be spread over several places" in refusal(
        "e2b", input_ids=tokens, **pictures("e2b", (2, 2))
    )


@every_shape
def test_frames_out_of_line(shape):
    text = refusal(shape, input_ids=ids([4, 2], kind="video"), **films(shape, (1, 2, 1), (1, 2, 2)))
    assert "video frame 0 would be spread" not in text  # the first fits the run of four
    assert text.startswith("video frame 1 would be spread over several places")
    text = refusal(shape, input_ids=ids([4], kind="video"), **films(shape, (2, 2, 2)))
    assert text.startswith("the prompt has 4 video frame tokens, and what is given makes 8 (4, 4).")


@hearing
def test_sound_out_of_line(shape):
    given = sounds(shape, 12, 4)
    short, long = (4, 12) if shape == "12b" else (1, 3)
    text = refusal(shape, input_ids=ids([short, long], kind="audio"), **given)
    assert text.startswith("audio 0 would be spread over several places")
    assert f"audio tokens stand in runs of {short}, {long}, and" in text
    text = refusal(shape, input_ids=ids([long], kind="audio"), **given)
    assert text.startswith(f"the prompt has {long} audio tokens, and what is given makes {long + short}")


@pytest.mark.parametrize(
    ("kind", "noun", "keyword", "values"),
    [
        ("image", "image", "images", "pixel_values"),
        ("video", "video frame", "videos", "pixel_values_videos"),
        ("audio", "audio", "audio", "input_features"),
    ],
)
@hearing
def test_placeholders_without_media(shape, kind, noun, keyword, values):
    given: dict[str, Any] = {"input_ids": ids([], [3], kind=kind)}
    text = refusal(shape, **given)
    assert text.startswith(f"row 1 of the prompt has {noun} placeholders (3 tokens in all)")
    assert f"no {values} is given. Give `{keyword}=[...]`" in text
    for unseen in (
        {"cache": DynamicCache()},
        {"past_key_values": DynamicCache()},
        {"mm_encoder_outputs": {"image": object()}},
    ):
        assert check_media(config(shape), given | unseen) == MediaCount()
    assert "placeholders" in refusal(shape, **given, cache=None)
    assert check_media(config(shape), {"inputs_embeds": torch.zeros(1, 3, 40)}) == MediaCount()


def test_media_without_placeholders():
    text = refusal("e2b", input_ids=torch.tensor([[2, 60]]), **pictures("e2b", (2, 2)))
    assert text.startswith("the prompt has 0 image tokens, and what is given makes 4 (4).")


@every_shape
def test_beside_embeddings_media_are_counted_and_not_placed(shape):
    count = check_media(
        config(shape), {"inputs_embeds": torch.zeros(1, 9, 40), **pictures(shape, (2, 2), (3, 1))}
    )
    assert (count.images, count.image_spans) == ((4, 3), ())


# -- tensors of another model -------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["pixel_values", "pixel_values_videos", "input_features"])
@every_shape
def test_media_for_a_text_model(shape, values):
    with pytest.raises(BadArgument) as caught:
        check_media(config(shape, False), {values: torch.zeros(1, 4, 48)})
    text = str(caught.value)
    assert text.startswith(f"{values}: this is the text model alone ({config(shape, False).model_type})")
    assert '`StandardizedTransformer(..., task="image-text-to-text")`' in text


def test_sound_for_a_model_without_ears():
    text = refusal("31b", input_ids=ids([1], kind="audio"), **sounds("e2b", 4))
    assert text == "input_features: this model takes no sound; its config has no audio_config."


@every_shape
def test_images_of_another_patch_size(shape):
    given = pictures("e2b" if shape == "12b" else "12b", (2, 2))
    side, pixels, other = (8, 192, 48) if shape == "12b" else (4, 48, 192)
    text = refusal(shape, input_ids=ids([4]), **given)
    assert f"pixel_values has {other} numbers a patch, and this model's patches are {side} x {side}" in text
    assert f"{pixels} numbers" in text


def test_patches_that_pooling_does_not_divide():
    given = pictures("31b", (2, 2), patches=47)
    text = refusal("31b", input_ids=ids([4]), **given)
    assert "has 47 patches an image, padding included, which 2 x 2 pooling does not divide" in text
    with pytest.raises(ValueError, match="Cannot pool"):
        module("31b")(input_ids=ids([4]), **given)
    check_media(config("12b"), {"input_ids": ids([4]), **pictures("12b", (2, 2), patches=47)})


@every_shape
@pytest.mark.parametrize("kind", ["image", "video"])
def test_patches_without_their_positions(shape, kind):
    given: dict[str, Any] = pictures(shape, (2, 2)) if kind == "image" else films(shape, (1, 2, 2))
    values, positions = (
        ("pixel_values", "image_position_ids")
        if kind == "image"
        else (
            "pixel_values_videos",
            "video_position_ids",
        )
    )
    good = {"input_ids": ids([4], kind=kind), **given}
    check_media(config(shape), good)
    text = refusal(shape, **{name: value for name, value in good.items() if name != positions})
    assert text.startswith(f"{values} is given without {positions}")
    text = refusal(shape, **good | {positions: given[positions][:, :-4]})
    assert text.startswith(f"{positions} has shape (1, 44, 2); beside {values} of shape (1, 48, ")
    assert "it is (1, 48, 2)" in text
    assert "of shape (1, 48, " in refusal(shape, **good | {positions: given[positions][..., 0]})


@every_shape
def test_frames_without_their_number(shape):
    given = {"input_ids": ids([4, 4], kind="video"), **films(shape, (2, 2, 2))}
    text = refusal(shape, **{name: value for name, value in given.items() if name != "num_frames_per_video"})
    assert text.startswith("pixel_values_videos is given without num_frames_per_video")
    text = refusal(shape, **given | {"num_frames_per_video": torch.tensor([2, 1])})
    assert text == "num_frames_per_video counts 3 frames (2, 1), and pixel_values_videos has 2."


@pytest.mark.parametrize(("columns", "rows"), [(3, 4), (4, 3), (8, 1), (1, 8)])
def test_patches_that_fill_no_whole_kernels(columns, rows):
    given = pictures("e2b", (2, 2))
    given["image_position_ids"] = grid(columns, rows, 48)[None]
    text = refusal("e2b", input_ids=ids([columns * rows // 4]), **given)
    assert f"the {columns * rows} real patches of image 0 make no grid of whole 2 x 2 kernels" in text
    assert f"{columns} columns, {rows} rows" in text
    check_media(config("12b"), {"input_ids": ids([4]), **pictures("12b", (1, 4))})


@every_shape
def test_an_image_of_padding_alone(shape):
    given = pictures(shape, (2, 2), (2, 2))
    given["image_position_ids"][1] = -1
    assert refusal(shape, input_ids=ids([4]), **given).startswith("image 1 has no real patch")


@every_shape
def test_positions_past_the_table(shape):
    given = pictures(shape, (2, 2))
    given["image_position_ids"] += torch.where(given["image_position_ids"] >= 0, 158, 0)
    text = refusal(shape, input_ids=ids([4]), **given)
    last, table = (159, 80) if shape == "12b" else (161, 160)
    assert text == f"image_position_ids goes up to {last}; this model has {table} positions a side."


@every_shape
def test_values_of_another_form(shape):
    given: dict[str, Any] = {"input_ids": ids([4]), **pictures(shape, (2, 2))}
    text = refusal(shape, **given | {"pixel_values": given["pixel_values"][0]})
    assert text.startswith("pixel_values is [images patches pixels]; what is given has shape (48, ")
    text = refusal(shape, **given | {"pixel_values": [given["pixel_values"][0]]})
    assert "not list. What is to be processed goes by `images=`." in text
    text = refusal(shape, **given | {"pixel_values": (given["pixel_values"] * 255).to(torch.uint8)})
    assert text == "pixel_values are numbers from 0 to 1; what is given is torch.uint8. Divide it by 255."


@hearing
def test_sound_of_another_model(shape):
    other = sounds("e2b" if shape == "12b" else "12b", 8)
    text = refusal(shape, input_ids=ids([2], kind="audio"), **other)
    expected = (
        "16 numbers a frame, and this model takes 20 samples"
        if shape == "12b"
        else ("20 numbers a frame, and this model takes 16 mel bins")
    )
    assert expected in text


def test_fewer_mel_bins_that_transformers_would_take():
    """Two halvings round 13 to 16 bins up alike, so the shapes fit, and the sound is another's."""
    given = sounds("e2b", 8)
    given["input_features"] = given["input_features"][..., :13]
    with torch.no_grad():
        module("e2b")(input_ids=ids([2], kind="audio"), **given)
    assert "13 numbers a frame, and this model takes 16 mel bins" in refusal(
        "e2b", input_ids=ids([2], kind="audio"), **given
    )


@hearing
def test_sound_without_its_mask(shape):
    """transformers leaves it out and tells nothing, or dies (before 5.24)."""
    given: dict[str, Any] = {"input_ids": ids([8 if shape == "12b" else 2], kind="audio"), **sounds(shape, 8)}
    check_media(config(shape), given)
    mask = given.pop("input_features_mask")
    other = given | {"input_features": -given["input_features"]}
    with torch.no_grad(), suppress(UnboundLocalError):
        assert torch.equal(module(shape)(**given).logits, module(shape)(**other).logits)
    assert refusal(shape, **given).startswith("input_features is given without input_features_mask")
    text = refusal(shape, **given, input_features_mask=mask[:, :-1])
    assert text.startswith("input_features_mask has shape (1, 7); beside input_features of shape (1, 8, ")
    text = refusal(shape, **given, input_features_mask=mask.long())
    assert text.startswith("input_features_mask is torch.int64")
    text = refusal(shape, **given, input_features_mask=torch.zeros_like(mask))
    assert text.startswith("audio 0 makes no soft token")


# -- without values -----------------------------------------------------------------------------------------


@every_shape
def test_fake_and_meta_tensors_are_left_alone(shape):
    given = {"input_ids": ids([1]), **pictures(shape, (2, 2))}  # a count that would be refused
    assert "tokens" in refusal(shape, **given)
    meta = {name: value.to("meta") for name, value in given.items()}
    assert check_media(config(shape), meta) == MediaCount()
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(value) for name, value in given.items()}
        assert check_media(config(shape), fake) == MediaCount()
        assert check_media(config(shape), given | {"pixel_values": fake["pixel_values"]}) == MediaCount()
    narrow = meta | {"pixel_values": meta["pixel_values"][..., :-1]}
    assert "numbers a patch" in refusal(shape, **narrow)  # shapes are there to look at


@every_shape
def test_real_tensors_are_checked_under_a_fake_mode(shape):
    """`scan` prepares its inputs so."""
    fewer = ids([3])
    good = {"input_ids": ids([4]), **pictures(shape, (2, 2))}
    with FakeTensorMode():
        assert check_media(config(shape), good).images == (4,)
        with pytest.raises(BadArgument, match=re.escape("the prompt has 3 image tokens")):
            check_media(config(shape), good | {"input_ids": fewer})
