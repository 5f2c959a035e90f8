"""Which tokens see which: the masks that text blocks use beside images, video and sound, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gemloupe.testing import SHAPES
from tests.media.by_hand import films, pictures, sounds
from tests.media.given import (
    VIDEO,
    WITH_SOUND,
    Encoding,
    audio,
    bare,
    everything,
    image,
    mark,
    model,
    none,
    soft_tokens,
    text,
    video,
)

VISUAL = (mark("image", 1)[0], mark("video", 1)[0])
BOTH_WAYS = {"26b-a4b": ("sliding",), "31b": ("sliding",), "12b": ("sliding", "full")}
"""The kinds of block in which an image's tokens see each other, both ways, on each checkpoint."""


def touching(shape: str) -> Encoding:
    """Two images with no token between them, and a long one that overruns the window of six."""
    rows = [[2, 60, *mark("image", 2), *mark("image", 6), 62, 63], [2, *mark("image", 12), 64, 65]]
    return text(*rows) | pictures(shape, (2, 1), (3, 2), (4, 3))


def apart(shape: str) -> Encoding:
    rows = [[2, 60, *mark("image", 2), 61, *mark("image", 6), 62, 63]]
    return text(*rows) | pictures(shape, (2, 1), (3, 2))


def frames_touching(shape: str) -> Encoding:
    if not VIDEO:
        pytest.skip("this transformers release takes video in `generate` alone")
    rows = [[2, 60, *mark("video", 4), 61, *mark("image", 2), *mark("video", 2), *mark("video", 2), 62]]
    return text(*rows) | films(shape, (2, 2, 1), (2, 1, 2)) | pictures(shape, (2, 1))


def sound_between(shape: str) -> Encoding:
    if shape not in WITH_SOUND:
        return apart(shape)
    heard = mark("audio", soft_tokens(shape, 12))
    rows = [[2, 60, *mark("image", 2), *heard, *mark("image", 4), 62]]
    return text(*rows) | pictures(shape, (2, 1), (2, 2)) | sounds(shape, 12)


PROMPTS = {
    "words": none,
    "apart": apart,
    "touching": touching,
    "padded": image,
    "video": video,
    "frames touching": frames_touching,
    "sound": lambda shape: audio(shape) if shape in WITH_SOUND else none(shape),
    "sound between": sound_between,
    "everything": everything,
}


def by_hand(shape: str, kind: str, window: int | None, ids: Tensor, mask: Tensor) -> Tensor:
    """`[batch query key]`, token by token."""
    rows, width = ids.shape
    seen = torch.zeros(rows, width, width, dtype=torch.bool)
    for row in range(rows):
        # Neighbours of vision are one picture, whatever they are of.
        picture, pictures = [], 0
        for i in range(width):
            visual = int(ids[row, i]) in VISUAL
            pictures += visual and not (i and picture[i - 1])
            picture.append(pictures if visual else 0)
        for query in range(width):
            for key in range(width):
                together = bool(picture[query]) and picture[query] == picture[key]
                ahead = together and kind in BOTH_WAYS.get(shape, ())
                near = window is None or key > query - window
                unlimited = ahead and shape == "12b"  # there an image's tokens see all of it, at any distance
                wanted = (near and (key <= query or ahead)) or unlimited
                seen[row, query, key] = bool(mask[row, key]) and wanted
    return seen


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    ("shape", "attention"), [*((shape, None) for shape in SHAPES), ("31b", "eager"), ("12b", "eager")]
)
def test_what_is_seen(shape, attention, prompt):
    one, encoding = model(shape, attention), PROMPTS[prompt](shape)
    asked = [f"layers.*.self_attn.{name}" for name in ("visible_keys", "attention_probabilities")]
    with torch.no_grad(), one.trace(**encoding):
        found = one.record(asked)
    kinds = {block.kind for block in one.plan.blocks}
    assert kinds == {"sliding", "full"}
    for block in one.plan.blocks:
        wanted = by_hand(shape, block.kind, block.window, encoding["input_ids"], encoding["attention_mask"])
        real = encoding["attention_mask"].bool()
        at = f"layers[{block.index}].self_attn"
        visible = found[f"{at}.visible_keys"]
        assert visible.shape[1] == block.num_heads
        assert visible.dtype == torch.bool
        for head in range(block.num_heads):
            assert torch.equal(visible[:, head][real], wanted[real]), (block.index, head)
        pattern = found[f"{at}.attention_probabilities"]
        assert torch.equal((pattern > 0).transpose(1, 2)[real], visible.transpose(1, 2)[real]), block.index
        assert torch.allclose(pattern.sum(-1), torch.ones(())) or not real.all()


def test_the_prompts_tell_the_masks_apart():
    """Lest all of the above hold for a causal mask."""
    encoding = touching("31b")
    ids, mask = encoding["input_ids"], encoding["attention_mask"]
    sliding = by_hand("31b", "sliding", 6, ids, mask)
    full = by_hand("31b", "full", None, ids, mask)
    causal = by_hand("e2b", "sliding", 6, ids, mask)
    assert not torch.equal(sliding, causal)
    assert bool((sliding & ~causal).any())
    assert bool((sliding & ~full).any())
    assert bool((full & ~sliding).any())
    # The window limits looking back inside an image of twelve tokens, and not ahead; on 12B not even that.
    first = int((ids[1] == VISUAL[0]).nonzero()[0])
    assert bool(sliding[1, first, first + 11])
    assert not bool(sliding[1, first + 11, first])
    assert bool(by_hand("12b", "sliding", 6, ids, mask)[1, first + 11, first])


@pytest.mark.parametrize("shape", SHAPES)
def test_types_that_are_given_are_used(shape):
    """The user's own have the say: without any image among them all is causal."""
    one, encoding = model(shape), touching(shape)
    given = {**encoding, "mm_token_type_ids": torch.zeros_like(encoding["input_ids"])}
    with torch.no_grad(), one.trace(**given):
        found = one.record("layers.*.self_attn.visible_keys")
        logits = one.logits.save()
    for block in one.plan.blocks:
        ids, mask = encoding["input_ids"], encoding["attention_mask"]
        wanted = by_hand("e2b", block.kind, block.window, ids, mask)
        real = mask.bool()
        seen = found[f"layers[{block.index}].self_attn.visible_keys"][:, 0]
        assert torch.equal(seen[real], wanted[real])
    positions = (encoding["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        assert torch.equal(logits, bare(shape)(**given, position_ids=positions).logits)


@pytest.mark.parametrize("shape", SHAPES)
def test_types_are_counted_in_a_batch_of_invokes(shape):
    one = model(shape)
    first = text([2, 60, *mark("image", 4), 61, 62]) | pictures(shape, (2, 2))
    second = text([2, *mark("image", 8), 61]) | pictures(shape, (4, 2))
    found: list[Any] = []
    with torch.no_grad(), one.trace() as tracer:
        for encoding in (first, text([2, 60, 61]), second):
            with tracer.invoke(**encoding):
                found.append(one.record("layers.*.self_attn.visible_keys"))
    for encoding, values in zip((first, text([2, 60, 61]), second), found, strict=True):
        tokens = encoding["input_ids"].shape[1]
        for block in one.plan.blocks:
            ids, mask = encoding["input_ids"], encoding["attention_mask"]
            wanted = by_hand(shape, block.kind, block.window, ids, mask)
            seen = values[f"layers[{block.index}].self_attn.visible_keys"]
            assert torch.equal(seen[:, 0, -tokens:, -tokens:], wanted), block.index
            assert not bool(seen[..., -tokens:, :-tokens].any())
