"""What a verification runs a model on: tokens and media, from whatever a user gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..errors import BadArgument
from ..plan import ModelPlan
from .media import Media
from .towers import AudioTower, Towers, VisionTower

__all__ = ["Prompt", "default_prompts", "media_prompt", "prompt_of"]


class Prompt(NamedTuple):
    """One forward's tokens, and its images, frames of video and sounds."""

    ids: Tensor
    """`[batch seq]`."""
    mask: Tensor
    """Of real tokens, `[batch seq]`; padded on the left."""
    media: Media | None = None
    kinds: Tensor | None = None
    """Which tokens are an image's (1), a frame's (2), a sound's (3), and text (0), `[batch seq]`."""
    frames: Tensor | None = None
    """How many frames of each video there are, `[videos]`."""

    def to(self, device: torch.device) -> Prompt:
        """The same, its tokens on a device."""
        kinds = None if self.kinds is None else self.kinds.to(device)
        return self._replace(ids=self.ids.to(device), mask=self.mask.to(device), kinds=kinds)

    @property
    def encoding(self) -> dict[str, Tensor]:
        """What a model is called with, but for the positions."""
        given: dict[str, Tensor | None] = {} if self.media is None else dict(vars(self.media))
        given |= {"mm_token_type_ids": self.kinds, "num_frames_per_video": self.frames}
        given |= {"input_ids": self.ids, "attention_mask": self.mask}
        return {name: value for name, value in given.items() if value is not None}


# The longest of the default prompts overruns the window by so many tokens; the others make a padded batch.
_BEYOND_THE_WINDOW: Final = 7
_LENGTHS: Final = (12, 7, 3)
# Coprime to every vocabulary, so that the tokens of a prompt go all over it before one comes twice.
_STRIDE: Final = 7_919

# The images of the built-in prompt with media, in columns and rows of soft tokens, and how many more rows of
# patches than the larger has each is padded to.
_IMAGES: Final = ((3, 2), (2, 2))
_PADDED: Final = 1
_FRAMES: Final = 12
"""Of the tower, or raw ones, of which the last are padding."""
_PADDED_FRAMES: Final = 3
_SUBSAMPLED: Final = 4
_KINDS: Final = ("image", "video", "audio")

_WITH_MEDIA: Final = (*(field.name for field in fields(Media)), "mm_token_type_ids", "num_frames_per_video")


def default_prompts(plan: ModelPlan, special: frozenset[int], bos: int) -> list[Prompt]:
    """The fixed tokens that a model is verified on: a sequence longer than its window, and a padded batch.

    Each begins with `bos`; the rest are tokens from all over the vocabulary, but for the `special` ones,
    which stand for images and the like.
    """
    count = min(plan.sliding_window + _BEYOND_THE_WINDOW, plan.max_positions)
    return [_batch(plan, special, bos, [count]), _batch(plan, special, bos, list(_LENGTHS))]


def _batch(plan: ModelPlan, special: frozenset[int], bos: int, lengths: list[int]) -> Prompt:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    tokens = (token for i in range(plan.vocab_size * _STRIDE) if (token := _nth(plan, i)) not in special)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.tensor([bos, *(next(tokens) for _ in range(length - 1))])
        mask[row, -length:] = 1
    return Prompt(ids, mask)


def media_prompt(plan: ModelPlan, towers: Towers, special: frozenset[int], bos: int) -> Prompt:
    """Fixed text with two images of unequal size and a sound, each padded, as far as the model takes them.

    Pixels and samples are random, of a fixed seed.
    """
    random = torch.Generator().manual_seed(0)
    media: dict[str, Tensor] = {}
    tokens = (token for i in range(plan.vocab_size * _STRIDE) if (token := _nth(plan, i)) not in special)
    row, kinds = [bos, next(tokens)], [0, 0]

    def say(token: int | None, many: int, kind: str) -> None:
        row.extend([0 if token is None else token] * many + [next(tokens), next(tokens)])
        kinds.extend([_KINDS.index(kind) + 1] * many + [0, 0])

    if (vision := towers.vision) is not None:
        side = vision.pooling if isinstance(vision, VisionTower) else 1
        soft = [columns * rows for columns, rows in _IMAGES]
        shape = len(_IMAGES), (max(soft) + _PADDED) * side**2
        media["pixel_values"] = torch.rand(*shape, 3 * vision.patch_size**2, generator=random)
        media["image_position_ids"] = torch.full((*shape, 2), -1)
        for image, (columns, rows) in enumerate(_IMAGES):
            places = torch.cartesian_prod(torch.arange(rows * side), torch.arange(columns * side)).flip(-1)
            media["image_position_ids"][image, : len(places)] = places
            say(towers.image_token, soft[image], "image")
    if (audio := towers.audio) is not None:
        each = _SUBSAMPLED if isinstance(audio, AudioTower) else 1
        size = audio.channels[0] if isinstance(audio, AudioTower) else audio.output_size
        real = (_FRAMES - _PADDED_FRAMES) * each
        media["input_features"] = torch.randn(1, _FRAMES * each, size, generator=random)
        media["input_features_mask"] = (torch.arange(_FRAMES * each) < real)[None]
        say(towers.audio_token, real // each, "audio")
    ids = torch.tensor([row])
    return Prompt(ids, torch.ones_like(ids), Media(**media), torch.tensor([kinds]))


def _nth(plan: ModelPlan, i: int) -> int:
    return (1 + i) * _STRIDE % plan.vocab_size


def prompt_of(inputs: Any, tokenizer: Any, towers: Towers | None = None) -> Prompt:
    """What a user gives, as a prompt.

    Text or several texts, token ids (`[seq]` or `[batch seq]`, a tensor or lists), or a mapping of
    `input_ids` and `attention_mask`, as a tokenizer returns it, and of media, as a processor does.

    towers: those of the model, where it takes media.

    Raises: BadArgument, for anything else, and for padding that is not on the left.
    """
    if isinstance(inputs, Sequence) and not inputs:
        raise BadArgument(
            "verify was given no input: the list is empty. Leave it out for the built-in prompts."
        )
    if isinstance(inputs, str):
        inputs = [inputs]
    if isinstance(inputs, Sequence) and all(isinstance(text, str) for text in inputs):
        inputs = tokenizer(list(inputs), return_tensors="pt", padding=True, padding_side="left")
    beside: Mapping[str, Any] = {}
    if isinstance(inputs, Mapping):
        beside, inputs = _known(inputs, towers), inputs.get("input_ids")
    ids = _integers("input_ids", inputs)
    mask = beside.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else _integers("attention_mask", mask).to(ids.device)
    if mask.shape != ids.shape:
        raise BadArgument(f"attention_mask is {list(mask.shape)}; input_ids are {list(ids.shape)}.")
    if bool((mask.ne(0).int().diff(dim=-1) < 0).any()) or not bool(mask[:, -1].all()):
        raise BadArgument(
            "attention_mask has padding after a real token; pad on the left: tokenizer.padding_side = 'left'."
        )
    media = Media.of(beside)
    if media is None or towers is None:
        return Prompt(ids, mask)
    if {"image", "video"} <= media.kinds:
        raise BadArgument(
            "verify takes images or frames of video, one at a time: the tower runs once for each, and its "
            "values have one name. Verify on the one, then on the other."
        )
    kinds = beside.get("mm_token_type_ids")
    kinds = _kinds(towers, ids) if kinds is None else _integers("mm_token_type_ids", kinds)
    return Prompt(ids, mask, media, kinds, beside.get("num_frames_per_video"))


def _known(inputs: Mapping[str, Any], towers: Towers | None) -> Mapping[str, Any]:
    given = {name: value for name, value in inputs.items() if value is not None}
    if media := [name for name in _WITH_MEDIA if name in given and towers is None]:
        raise BadArgument(
            f"verify was given {', '.join(media)}, and this load of the model takes text alone: load the "
            f"whole model, a *ForConditionalGeneration."
        )
    if unknown := sorted(given.keys() - {"input_ids", "attention_mask", *_WITH_MEDIA}):
        raise BadArgument(
            f"verify takes input_ids, attention_mask and media, not {', '.join(unknown)}: the reference "
            f"counts positions from each row's first real token."
        )
    return given


def _kinds(towers: Towers, ids: Tensor) -> Tensor:
    """What a processor calls `mm_token_type_ids`."""
    kinds = torch.zeros_like(ids)
    for kind, token in enumerate((towers.image_token, towers.video_token, towers.audio_token), start=1):
        if token is not None:
            kinds[ids == token] = kind
    return kinds


def _integers(name: str, given: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        tensor = torch.empty(0)
    if tensor.dim() == 1:
        tensor = tensor[None]
    if tensor.dim() != 2 or tensor.is_floating_point() or tensor.is_complex() or not tensor.numel():
        raise BadArgument(
            f"{name}: verify takes text, or token ids [batch seq], not {type(given).__name__}. "
            f"Write verify(model, 'The capital of France is')."
        )
    return tensor.long()
