"""What a call is given of images, video frames and sound, refused where it cannot fit its prompt.

transformers fills the placeholder tokens of a batch in reading order, row after row, with the soft tokens of
its media in theirs, and compares nothing but the two totals: images in another order than their
placeholders, or features without their mask, would be mistaken or left out without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .errors import BadArgument
from .ledger import is_fake
from .prompts import CACHES

__all__ = ["MediaCount", "Span", "check_media", "feature_width", "kernel_side", "patch_side", "placeholders"]


class Span(NamedTuple):
    """Where the soft tokens of one item stand in the prompt: its row, and the tokens from start to stop."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class MediaCount:
    """How many soft tokens each item makes that a call is given, in the order of its tensors.

    The spans are where they stand in the prompt: one per item, none where the prompt is not given as ids.
    """

    images: tuple[int, ...] = ()
    frames: tuple[int, ...] = ()
    audios: tuple[int, ...] = ()
    videos: tuple[int, ...] = ()
    """Frames per video."""
    image_spans: tuple[Span, ...] = ()
    frame_spans: tuple[Span, ...] = ()
    audio_spans: tuple[Span, ...] = ()

    @property
    def given(self) -> bool:
        """Whether there are images, video frames or sounds."""
        return bool(self.images or self.frames or self.audios)


class _Kind(NamedTuple):
    """One kind of media: what it is called, by transformers and by the user."""

    noun: str
    values: str
    beside: str
    """What transformers needs beside the values: positions, or a mask."""
    layout: str
    config: str
    token: str
    keyword: str


_KINDS: Final = {
    "images": _Kind(
        noun="image",
        values="pixel_values",
        beside="image_position_ids",
        layout="[images patches pixels]",
        config="vision_config",
        token="image_token_id",
        keyword="images",
    ),
    "frames": _Kind(
        noun="video frame",
        values="pixel_values_videos",
        beside="video_position_ids",
        layout="[frames patches pixels]",
        config="vision_config",
        token="video_token_id",
        keyword="videos",
    ),
    "audios": _Kind(
        noun="audio",
        values="input_features",
        beside="input_features_mask",
        layout="[audios frames features]",
        config="audio_config",
        token="audio_token_id",
        keyword="audio",
    ),
}
_UNIFIED: Final = "gemma4_unified"


def check_media(config: Any, encoding: Mapping[str, Any]) -> MediaCount:
    """How many soft tokens each item of a call's media makes, once it is known that they fit the prompt.

    config: the model's, a wrapper's or a text model's. encoding: what the model is called with.
    Looks at shapes, positions, masks and ids alone. Fake and meta tensors hold none to look at: where some
    of what is given is one, shapes alone are checked, and the count is empty.

    Raises: BadArgument, for media that the model does not take or of another model's shapes, for what
    transformers would leave out, and for placeholders and media that do not match one another.
    """
    given = {name: value for name, value in encoding.items() if value is not None}
    with unset_fake_temporarily():  # `scan` prepares its inputs under a fake mode
        _refuse(_shape_refusals(config, given))
        if any(isinstance(value, Tensor) and is_fake(value) for value in given.values()):
            return MediaCount()
        _refuse(_position_refusals(config, given))
        sizes = {name: _sizes(name, config, given) for name in _KINDS}
        spans = {name: _spans(_KINDS[name], config, given, sizes[name]) for name in _KINDS}
        _refuse(_place_refusals(config, given, sizes, spans))
        return MediaCount(
            **sizes,
            videos=_whole(given.get("num_frames_per_video")),
            image_spans=spans["images"],
            frame_spans=spans["frames"],
            audio_spans=spans["audios"],
        )


def placeholders(config: Any) -> dict[int, str]:
    """The token ids in whose place the model's forward puts soft tokens, and what each is of.

    None of a text model, to which they are tokens as any other.
    """
    tokens = {getattr(config, kind.token, None): kind.noun for kind in _KINDS.values()}
    return {token: noun for token, noun in tokens.items() if token is not None}


def _refuse(reasons: Iterator[str]) -> None:
    reason = next(reasons, None)
    if reason is not None:
        raise BadArgument(reason)


# -- shapes -------------------------------------------------------------------------------------------------


def _shape_refusals(config: Any, given: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in _KINDS.items():
        values = given.get(kind.values)
        if values is None:
            continue
        if getattr(config, kind.config, None) is None:
            yield _no_such_part(config, kind)
        elif not isinstance(values, Tensor):
            yield (
                f"{kind.values} is a tensor {kind.layout}, as the processor makes it, not "
                f"{type(values).__name__}. What is to be processed goes by `{kind.keyword}=`."
            )
        elif values.dim() != 3:
            yield f"{kind.values} is {kind.layout}; what is given has shape {tuple(values.shape)}."
        else:
            yield from (_sound_refusals if name == "audios" else _patch_refusals)(config, kind, given)


def _no_such_part(config: Any, kind: _Kind) -> str:
    media = "sound" if kind.keyword == "audio" else kind.keyword
    if not hasattr(config, "vision_config"):
        return (
            f"{kind.values}: this is the text model alone ({config.model_type}), which takes no {media}.\n"
            f'Load the whole one: `StandardizedTransformer(..., task="image-text-to-text")`, or wrap a '
            f"*ForConditionalGeneration."
        )
    return f"{kind.values}: this model takes no {media}; its config has no {kind.config}."


def _patch_refusals(config: Any, kind: _Kind, given: Mapping[str, Any]) -> Iterator[str]:
    values = given[kind.values]
    patches, pixels = values.shape[1:]
    side = patch_side(config)
    if not values.is_floating_point():
        yield f"{kind.values} are numbers from 0 to 1; what is given is {values.dtype}. Divide it by 255."
    if pixels != 3 * side**2:
        yield (
            f"{kind.values} has {pixels} numbers a patch, and this model's patches are {side} x {side} "
            f"pixels of 3 colours, {3 * side**2} numbers. Use this model's own processor."
        )
    kernel = kernel_side(config)
    if patches % kernel**2:
        yield (
            f"{kind.values} has {patches} patches an image, padding included, which {kernel} x {kernel} "
            f"pooling does not divide. Pad to a multiple of {kernel**2}, positions with (-1, -1)."
        )
    yield from _missing(kind, given)
    positions = given[kind.beside]
    if positions.is_floating_point():
        yield f"{kind.beside} are whole numbers, places of patches; what is given is {positions.dtype}."
    if positions.shape != (values.shape[0], patches, 2):
        yield (
            f"{kind.beside} has shape {tuple(positions.shape)}; beside {kind.values} of shape "
            f"{tuple(values.shape)} it is {(values.shape[0], patches, 2)}, an (x, y) per patch."
        )
    if kind.keyword == "videos":
        yield from _missing(kind._replace(beside="num_frames_per_video"), given)


def _sound_refusals(config: Any, kind: _Kind, given: Mapping[str, Any]) -> Iterator[str]:
    features = given[kind.values]
    width, what = feature_width(config.audio_config)
    if features.shape[2] != width:
        yield (
            f"{kind.values} has {features.shape[2]} numbers a frame, and this model takes {width} {what}. "
            f"Use this model's own processor."
        )
    yield from _missing(kind, given)
    mask = given[kind.beside]
    if mask.shape != features.shape[:2]:
        yield (
            f"{kind.beside} has shape {tuple(mask.shape)}; beside {kind.values} of shape "
            f"{tuple(features.shape)} it is {tuple(features.shape[:2])}."
        )
    if mask.dtype != torch.bool:
        yield f"{kind.beside} is {mask.dtype}, which would index where it is to select. Give `.bool()`."


def _missing(kind: _Kind, given: Mapping[str, Any]) -> Iterator[str]:
    if not isinstance(given.get(kind.beside), Tensor):
        yield (
            f"{kind.values} is given without {kind.beside}; the processor returns both: pass all that it "
            f"returns, `trace(**encoding)`."
        )


# -- positions ----------------------------------------------------------------------------------------------


def _position_refusals(config: Any, given: Mapping[str, Any]) -> Iterator[str]:
    for name in ("images", "frames"):
        kind = _KINDS[name]
        if kind.values in given:
            yield from _grid_refusals(config, kind, given[kind.beside])
    frames = given.get("pixel_values_videos")
    if frames is not None and sum(counts := _whole(given["num_frames_per_video"])) != len(frames):
        yield (
            f"num_frames_per_video counts {sum(counts)} frames ({_listed(counts)}), and pixel_values_videos "
            f"has {len(frames)}."
        )
    silent = [i for i, size in enumerate(_sizes("audios", config, given)) if size == 0]
    if silent:
        yield (
            f"audio {silent[0]} makes no soft token: it is too short, or its input_features_mask is False "
            f"wherever it counts."
        )


def _grid_refusals(config: Any, kind: _Kind, positions: Tensor) -> Iterator[str]:
    """Patches that do not lie in whole kernels, which the pooling would count otherwise than the split."""
    real = (positions != -1).all(-1)
    empty = (real.sum(-1) == 0).nonzero().flatten().tolist()
    if empty:
        yield f"{kind.noun} {empty[0]} has no real patch: every one of its {kind.beside} is (-1, -1)."
    table = _position_table(config.vision_config)
    if int(positions.max()) >= table:
        yield f"{kind.beside} goes up to {int(positions.max())}; this model has {table} positions a side."
    kernel = kernel_side(config)
    if kernel == 1:
        return
    # As Gemma4VisionPooler counts: padding falls into the first kernel, where it adds nothing.
    x, y = positions.clamp(min=0).unbind(-1)
    columns = x.amax(-1, keepdim=True) + 1
    place = x // kernel + columns // kernel * (y // kernel)
    for index in range(len(positions)):
        pooled, patches = len(place[index].unique()), int(real[index].sum())
        if pooled * kernel**2 != patches or int(columns[index]) % kernel:
            yield (
                f"the {patches} real patches of {kind.noun} {index} make no grid of whole {kernel} x "
                f"{kernel} kernels: {int(columns[index])} columns, {int(y[index].max()) + 1} rows. Each side "
                f"is a multiple of {kernel}."
            )


# -- places -------------------------------------------------------------------------------------------------


def _sizes(name: str, config: Any, given: Mapping[str, Any]) -> tuple[int, ...]:
    """Soft tokens per item: `get_image_features` and `get_audio_features` of the wrappers count so."""
    kind = _KINDS[name]
    if kind.values not in given:
        return ()
    if name == "audios":
        # The two convolutions of Gemma4AudioSubSampleConvProjection take every other frame each.
        step = 1 if config.model_type == _UNIFIED else 4
        return _whole(given[kind.beside][:, ::step].sum(-1))
    return _whole((given[kind.beside] != -1).all(-1).sum(-1) // kernel_side(config) ** 2)


def _spans(kind: _Kind, config: Any, given: Mapping[str, Any], sizes: tuple[int, ...]) -> tuple[Span, ...]:
    """The spans that the items' soft tokens fill; fewer, where they do not line up."""
    places, spans = _places(kind, config, given), []
    for size in sizes:
        (here, places) = (places[:size], places[size:])
        if not here or here[-1] != (here[0][0], here[0][1] + size - 1):
            break
        spans.append(Span(here[0][0], here[0][1], here[0][1] + size))
    return tuple(spans)


def _places(kind: _Kind, config: Any, given: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Row and column of every placeholder token, in reading order."""
    ids, token = given.get("input_ids"), getattr(config, kind.token, None)
    if not isinstance(ids, Tensor) or token is None:
        return []
    ids = ids[None] if ids.dim() == 1 else ids
    return [(row, column) for row, column in (ids == token).nonzero().tolist()]


def _place_refusals(
    config: Any,
    given: Mapping[str, Any],
    sizes: Mapping[str, tuple[int, ...]],
    spans: Mapping[str, tuple[Span, ...]],
) -> Iterator[str]:
    if not isinstance(given.get("input_ids"), Tensor):
        return
    types = given.get("mm_token_type_ids")
    if isinstance(types, Tensor) and types.shape != given["input_ids"].shape:
        yield (
            f"mm_token_type_ids has shape {tuple(types.shape)} beside input_ids of shape "
            f"{tuple(given['input_ids'].shape)}; it is one number a token. Leave it out: "
            f"it is made of the ids then."
        )
    unseen = {*CACHES, "mm_encoder_outputs"} & given.keys()
    for name, kind in _KINDS.items():
        places, wanted = _places(kind, config, given), sizes[name]
        if kind.values not in given:
            if places and not unseen:
                yield (
                    f"row {places[0][0]} of the prompt has {kind.noun} placeholders ({len(places)} tokens in "
                    f"all), and no {kind.values} is given. Give `{kind.keyword}=[...]` beside the text, or "
                    f"all that the processor returned."
                )
        elif len(places) != sum(wanted):
            yield (
                f"the prompt has {len(places)} {kind.noun} tokens, and what is given makes {sum(wanted)} "
                f"({_listed(wanted)}). An item needs as many placeholder tokens as it makes soft tokens; the "
                f"processor writes them: `trace(text, {kind.keyword}=[...])`."
            )
        elif len(spans[name]) != len(wanted):
            index = len(spans[name])
            yield (
                f"{kind.noun} {index} would be spread over several places: the prompt's {kind.noun} tokens "
                f"stand in runs of {_listed(_runs(places))}, and the {kind.noun}s make {_listed(wanted)}, in "
                f"this order. Give them in the order of their placeholders, row after row."
            )


def _runs(places: list[tuple[int, int]]) -> tuple[int, ...]:
    """The lengths of the runs of placeholders, in reading order."""
    lengths: list[int] = []
    for before, (row, column) in zip([None, *places], places, strict=False):
        if before == (row, column - 1):
            lengths[-1] += 1
        else:
            lengths.append(1)
    return tuple(lengths)


# -- what the config says -----------------------------------------------------------------------------------


def kernel_side(config: Any) -> int:
    """Patches a side that one soft token pools; the unified model's patches come merged."""
    return 1 if config.model_type == _UNIFIED else config.vision_config.pooling_kernel_size


def patch_side(config: Any) -> int:
    """The side of a patch in pixels, as the model takes it."""
    vision = config.vision_config
    merged = vision.pooling_kernel_size if config.model_type == _UNIFIED else 1
    return vision.patch_size * merged


def _position_table(vision: Any) -> int:
    size = getattr(vision, "position_embedding_size", None)
    return vision.mm_posemb_size if size is None else size


def feature_width(audio: Any) -> tuple[int, str]:
    """How many numbers a frame of sound has, and what they are."""
    samples = getattr(audio, "audio_embed_dim", None)
    if samples is not None:
        return samples, "samples a frame"
    # `input_proj_linear` is sized as (channels[0] // 4) * channels[1]: right for as many bins as channels.
    return audio.subsampling_conv_channels[0], "mel bins a frame"


def _whole(counts: Any) -> tuple[int, ...]:
    return () if counts is None else tuple(int(count) for count in torch.as_tensor(counts).flatten())


def _listed(counts: tuple[int, ...]) -> str:
    shown = ", ".join(str(count) for count in counts[:8])
    return f"{shown}, ..." if len(counts) > 8 else shown
