"""What a session with images is made of: copies, kept edits, caches, early stops, ready-made features."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gemloupe.errors import BadArgument, NeverRan
from gemloupe.testing import SHAPES, tiny
from tests.core.models import SEED
from tests.media.by_hand import pictures
from tests.media.given import (
    TOWERS,
    bare,
    close,
    everything,
    full,
    image,
    logits_of,
    mark,
    model,
    none,
    text,
    video,
    with_video,
)
from tests.media.test_batches import alone, invokes

SOME = pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])


@torch.no_grad()
def logits(one: Any, encoding: dict[str, Any]) -> Tensor:
    with one.trace(**encoding):
        found = one.logits.save()
    return found


@SOME
def test_a_deep_copy_is_a_model_of_its_own(shape):
    one, encoding = model(shape), everything(shape)
    copied = copy.deepcopy(one)
    wanted = logits_of(bare(shape), shape, encoding)
    with torch.no_grad(), copied.trace(**encoding):
        copied.vision.image_features[:] = 0
        changed = copied.logits.save()
    assert not torch.equal(changed, wanted)
    with torch.no_grad():
        for part in (copied.projector, copied.vision):
            for weight in part._module.parameters():
                weight.zero_()
    assert torch.equal(logits(one, encoding), wanted)
    assert not torch.equal(logits(copied, encoding), wanted)


@SOME
def test_a_kept_edit_and_a_call_without_images(shape):
    one = model(shape)
    path = "vision.tower_output"
    with one.edit() as (_, strict):
        strict.vision.tower_output[:] = 0
    with one.edit() as (_, lenient):
        told = False
        try:
            lenient.vision.tower_output[:] = 0
        except NeverRan:
            told = True  # noqa: F841
    for edited in (strict, lenient):
        assert not torch.equal(logits(edited, image(shape)), logits(one, image(shape)))
    assert torch.equal(logits(lenient, none(shape)), logits(one, none(shape)))
    with pytest.raises(NeverRan, match=f"{path}: this call was given no image or video.*\n.*except gemloupe"):
        logits(strict, none(shape))
    assert torch.equal(logits(one, none(shape)), logits_of(bare(shape), shape, none(shape)))


@SOME
def test_an_edit_in_place_can_be_cleared(shape):
    one, encoding = tiny(shape, wrapper=True, seed=SEED), image(shape)
    with one.edit(inplace=True):
        one.vision.image_features[:] = 0
    with torch.no_grad(), one.trace(**encoding):
        stream = one.layers[0].layer_input.save()
    assert bool((stream[encoding["input_ids"] == mark("image", 1)[0]] == 0).all())
    one.clear_edits()
    assert torch.equal(logits(one, encoding), logits_of(bare(shape), shape, encoding))


@SOME
def test_a_trace_can_stop_at_the_tower(shape):
    one, encoding = model(shape), image(shape)
    blocks: list[int] = []
    handle = one.layers[0]._module.register_forward_hook(lambda *_: blocks.append(0))
    with torch.no_grad(), one.trace(**encoding) as tracer:
        features = one.vision.image_features.save()
        tracer.stop()
    found = one.collect(encoding, "vision.image_features")
    assert blocks == []
    handle.remove()
    assert torch.equal(features, found["vision.image_features"])


@SOME
def test_ready_made_features(shape):
    """`mm_encoder_outputs`: the scatter has them, the tower does not run, the masks are those of images."""
    one = model(shape)
    calls = (
        (image(shape), "get_image_features", "image", ("pixel_values", "image_position_ids")),
        (
            video(shape),
            "get_video_features",
            "video",
            ("pixel_values_videos", "video_position_ids", "num_frames_per_video"),
        ),
    )
    for encoding, method, kind, names in calls:
        with torch.no_grad():
            outputs = getattr(bare(shape).model, method)(
                *(encoding[name] for name in names), return_dict=True
            )
        words = {name: value for name, value in encoding.items() if name not in names}
        ready = {**words, "mm_encoder_outputs": {kind: outputs}}
        with torch.no_grad(), one.trace(**ready):
            features = getattr(one.vision, f"{kind}_features").save()
            found = one.logits.save()
        assert torch.equal(features, torch.cat(outputs.pooler_output))
        assert torch.equal(found, logits_of(bare(shape), shape, encoding))
        with pytest.raises(
            NeverRan, match=r"vision\.tower_output: this call was given its image or video enc"
        ):
            with one.trace(**ready):
                one.vision.tower_output.save()
        with pytest.raises(BadArgument, match="`mm_encoder_outputs` are of a whole call"):
            with one.trace() as tracer:
                with tracer.invoke(**ready):
                    one.logits.save()
                with tracer.invoke(**text([2, 60])):
                    one.logits.save()


@SOME
def test_image_tokens_are_positions(shape):
    one, encoding = model(shape), image(shape)
    places = encoding["input_ids"] == mark("image", 1)[0]
    found = one.collect(encoding, ["layers[0].layer_input", "vision.image_features"], positions=places)
    assert torch.equal(found["layers[0].layer_input"], found["vision.image_features"])
    with torch.no_grad(), one.trace(**encoding):
        told = one.intervene(1, torch.zeros_like, positions=places)
        stream = one.layers[1].layer_output.save()
    assert told.counts == {1: int(places.sum())}
    assert torch.equal((stream == 0).all(-1), places)


@SOME
def test_images_can_change_places(shape):
    """Swapped features are swapped images."""
    one = model(shape)
    encoding = text([2, *mark("image", 4), 60, *mark("image", 4), 61])
    encoding |= pictures(shape, (2, 2), (2, 2), patches=16)
    with torch.no_grad(), one.trace(**encoding):
        features = one.vision.image_features
        one.vision.image_features = torch.cat([features[4:], features[:4]])
        found = one.logits.save()
    swapped = {**encoding, "pixel_values": encoding["pixel_values"].flip(0)}
    assert close(found, logits_of(bare(shape), shape, swapped)) < 1e-5


@pytest.mark.parametrize("shape", TOWERS)
def test_a_block_can_be_skipped(shape):
    one, encoding = model(shape), image(shape)
    with torch.no_grad(), one.trace(**encoding):
        stream = one.vision.layers[1].layer_input.save()
        one.vision.layers[1].skip(stream)
        out = one.vision.tower_output.save()
    assert torch.equal(out, stream)


@pytest.mark.parametrize("shape", ["e2b", "31b"])
def test_a_cache_keeps_an_invoke_s_own(shape):
    one, given = model(shape), invokes(shape)
    with torch.no_grad(), one.trace() as tracer:
        with tracer.invoke(**given[0]):
            first = tracer.cache()
        with tracer.invoke(**given[1]):
            second = tracer.cache()
        with tracer.invoke(**given[2]):
            pass
    for number, cache in enumerate((first, second)):
        wanted = alone(shape)[number]["vision.image_features"]
        assert close(cache[one.projector.path].output, wanted) < 1e-5
        assert len(cache["model.lm_head"].output) == 1


@SOME
def test_a_model_cast_in_place(shape):
    one = tiny(shape, wrapper=True, seed=SEED)
    encoding = image(shape)
    before = logits(one, encoding)
    one._module.to(torch.bfloat16)
    with torch.no_grad(), one.trace(**encoding):
        features = one.vision.image_features.save()
        after = one.logits.save()
    assert features.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(after, one._module(**full(shape, encoding)).logits)
    assert not torch.equal(after.float(), before)


def same_patterns(one: Any, shape: str) -> Tensor:
    """The logits of a trace in which the patterns of a tower and of the text are those of sdpa."""
    encoding = image(shape)
    with torch.no_grad(), one.trace(**encoding):
        towers = one.vision.layers[0].self_attn.attention_probabilities.save()
        stream = one.layers[0].self_attn.attention_probabilities.save()
        found = one.logits.save()
    patches = (encoding["image_position_ids"] != -1).all(-1)
    tokens = encoding["attention_mask"].bool()
    plain = alone_patterns(shape)
    assert close(towers.transpose(1, 2)[patches], plain[0].transpose(1, 2)[patches]) < 3e-6
    assert close(stream.transpose(1, 2)[tokens], plain[1].transpose(1, 2)[tokens]) < 3e-6
    return found


@pytest.mark.parametrize("shape", ["26b-a4b", "31b"])
def test_another_attention_between_two_traces(shape):
    one: Any = tiny(shape, wrapper=True, seed=SEED)
    for attention in ("eager", "sdpa"):
        one._module.set_attn_implementation(attention)
        assert one._module.config.vision_config._attn_implementation == attention
        found = same_patterns(one, shape)
        with torch.no_grad():
            assert torch.equal(found, one._module(**full(shape, image(shape))).logits)


# 2026-11-29, torch 2.13: its compiler warns of itself where a flex mask is indexed.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_patterns_under_flex_attention():
    one: Any = tiny("31b", wrapper=True, seed=SEED, attn_implementation="flex_attention")
    assert one._module.config.vision_config._attn_implementation == "flex_attention"
    found = same_patterns(one, "31b")
    real = image("31b")["attention_mask"].bool()
    assert close(found[real], logits(model("31b"), image("31b"))[real]) < 1e-5


def alone_patterns(shape: str) -> tuple[Tensor, Tensor]:
    one = model(shape)
    with torch.no_grad(), one.trace(**image(shape)):
        towers = one.vision.layers[0].self_attn.attention_probabilities.save()
        stream = one.layers[0].self_attn.attention_probabilities.save()
    return towers, stream


@with_video
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_is_a_pass_of_the_tower(shape):
    """Images first, then the frames of video; there is no third."""
    one, encoding = model(shape), everything(shape)
    sizes: list[int] = []
    with torch.no_grad(), one.trace(**encoding) as tracer:
        for _ in tracer.iter[:2]:
            patches = one.vision.patch_embeddings
            sizes.append(len(patches))
    assert sizes == [3, 4]
    for given, passes in ((encoding, 2), (image(shape), 1)):
        with pytest.raises(NeverRan, match=f"step {passes} was asked for, and a forward has {passes} of it"):
            with torch.no_grad(), one.trace(**given) as tracer:
                for _ in tracer.iter[:3]:
                    one.vision.patch_embeddings


@with_video
@SOME
def test_no_later_step_has_another_s_frames(shape):
    """In a batch with video an invoke with images alone has one pass, and is told so."""
    one, given = model(shape), invokes(shape)
    sizes: list[int] = []
    with pytest.raises(NeverRan, match="step 1 has new tokens and no image or video"):
        with torch.no_grad(), one.generate(max_new_tokens=2, do_sample=False) as tracer:
            with tracer.invoke(**given[1]):
                for _ in tracer.iter[:2]:
                    patches = one.vision.patch_embeddings
                    sizes.append(len(patches))
            with tracer.invoke(**given[3]):
                one.vision.video_features
    assert sizes == [2]
