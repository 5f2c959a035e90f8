"""What the tests of images, video and sound run: models, calls made by hand, and the values of each."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4Model

from gemloupe import StandardizedTransformer
from gemloupe.media import hands_on_frames
from gemloupe.support import Support
from gemloupe.testing import SHAPES, tiny, tiny_module
from tests.core.models import SEED
from tests.media.by_hand import films, pictures, sounds, token_id

TOWERS = tuple(shape for shape in SHAPES if shape != "12b")
WITH_SOUND = ("e2b", "e4b", "12b")
MEDIA = {
    "image": ("vision", "projector"),
    "video": ("vision", "projector"),
    "audio": ("audio", "audio_projector"),
}
GIVEN_BY = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}

Encoding = dict[str, Tensor]

# transformers 5.20 drops `num_frames_per_video` on the way to the tower, so that no forward takes video.
VIDEO = hands_on_frames(Gemma4Model)
with_video = pytest.mark.skipif(not VIDEO, reason="this transformers release takes video in `generate` alone")


@cache
def model(shape: str, attention: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """A wrapped wrapper, one for the session; `None` picks sdpa where there is one, eager for sound."""
    return tiny(shape, wrapper=True, seed=SEED, attn_implementation=attention, dtype=dtype)


@cache
def bare(shape: str, attention: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own wrapper with the same weights, never wrapped and never traced."""
    return tiny_module(shape, wrapper=True, seed=SEED, attn_implementation=attention, dtype=dtype)


def mark(kind: str, count: int) -> list[int]:
    """So many placeholder tokens."""
    return [token_id(kind)] * count


def soft_tokens(shape: str, frames: int) -> int:
    """How many placeholders a sound of so many frames needs."""
    return frames if shape == "12b" else (frames + 3) // 4


def text(*rows: list[int]) -> Encoding:
    """Rows of ids padded on the left, and their mask."""
    width = max(map(len, rows))
    gaps = [width - len(row) for row in rows]
    return {
        "input_ids": torch.tensor([[0] * gap + row for gap, row in zip(gaps, rows, strict=True)]),
        "attention_mask": torch.tensor(
            [[0] * gap + [1] * len(row) for gap, row in zip(gaps, rows, strict=True)]
        ),
    }


def image(shape: str) -> Encoding:
    """Three images in two rows: two apart, and one that is all but the whole row."""
    rows = [[2, 60, *mark("image", 2), 61, *mark("image", 6), 62, 63], [2, *mark("image", 12), 64]]
    return text(*rows) | pictures(shape, (2, 1), (3, 2), (4, 3), seed=SEED)


def video(shape: str) -> Encoding:
    """Two videos of two frames, a word between their frames in the first row and none in the second."""
    if not VIDEO:
        pytest.skip("this transformers release takes video in `generate` alone")
    rows = [[2, 60, *mark("video", 2), 61, *mark("video", 2), 62], [2, 65, 66, *mark("video", 4), 63]]
    return text(*rows) | films(shape, (2, 2, 1), (2, 1, 2))


def audio(shape: str) -> Encoding:
    """Two sounds of unequal length, a row each."""
    rows = [[2, 60, *mark("audio", soft_tokens(shape, n)), 61, 62] for n in (21, 9)]
    return text(*rows) | sounds(shape, 21, 9, seed=SEED)


def everything(shape: str) -> Encoding:
    """Images, videos and, where the model takes it, sound, in two rows of unequal length."""
    one = [2, 60, *mark("image", 2), 61, *mark("image", 6), 62]
    two = [2, 63, *mark("image", 12), 64]
    media = pictures(shape, (2, 1), (3, 2), (4, 3), seed=SEED)
    if VIDEO:
        one += [*mark("video", 2), 60, *mark("video", 2), 65]
        two += [*mark("video", 2), 60, *mark("video", 2), 65]
        media |= films(shape, (2, 2, 1), (2, 1, 2))
    if shape in WITH_SOUND:
        one += [*mark("audio", soft_tokens(shape, 21)), 60]
        two += [*mark("audio", soft_tokens(shape, 9)), 61]
        media |= sounds(shape, 21, 9, seed=SEED)
    return text(one, two) | media


def none(shape: str) -> Encoding:
    """Words alone."""
    return text([2, 60, 61, 62, 63, 64, 65, 66, 67], [2, 70, 71])


KINDS = {"image": image, "video": video, "audio": audio, "everything": everything, "none": none}


def has(shape: str, kind: str) -> bool:
    return {"audio": shape in WITH_SOUND, "video": VIDEO}.get(kind, True)


def types(shape: str, ids: Tensor) -> Tensor:
    """`mm_token_type_ids` as the processor counts them."""
    result = torch.zeros_like(ids)
    for number, kind in enumerate(("image", "video", "audio"), 1):
        if kind != "audio" or shape in WITH_SOUND:
            result[ids == token_id(kind)] = number
    return result


def full(shape: str, encoding: Encoding) -> Encoding:
    """The call that a processor and nnsight make of it: token types, and positions of real tokens."""
    mask = encoding.get("attention_mask", torch.ones_like(encoding["input_ids"]))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {
        **encoding,
        "attention_mask": mask,
        "position_ids": positions,
        "mm_token_type_ids": types(shape, encoding["input_ids"]),
    }


@torch.no_grad()
def logits_of(module: Any, shape: str, encoding: Encoding) -> Tensor:
    """The bare module's logits."""
    return module(**full(shape, encoding)).logits


def paths(model: StandardizedTransformer, encoding: Encoding) -> list[str]:
    """Every value that the model has and this call computes."""
    given = {kind for kind, name in GIVEN_BY.items() if name in encoding}
    found = []
    for row in support(model):
        if not row.available or not _runs(row.path, given):
            continue
        found += [row.path] if row.blocks is None else [row.path.replace("[i]", f"[{b}]") for b in row.blocks]
    return found


def _runs(path: str, given: set[str]) -> bool:
    host, _, name = path.rpartition(".")
    stack = host.partition(".")[0]
    if name.endswith("_token_mask") or stack not in ("vision", "projector", "audio", "audio_projector"):
        return True
    if name == "image_features":
        return "image" in given
    if name == "video_features":
        return "video" in given
    return bool(given & ({"audio"} if stack.startswith("audio") else {"image", "video"}))


@cache
def support(model: StandardizedTransformer) -> Support:
    """`model.support()`, which asks every block."""
    return model.support()


def axes(model: StandardizedTransformer, path: str) -> tuple[str, ...]:
    return support(model)[re.sub(r"\[\d+\]", "[i]", path)].layout.axes


def close(found: Tensor, wanted: Tensor) -> float:
    """The largest difference in units of the largest number."""
    assert found.shape == wanted.shape
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()
