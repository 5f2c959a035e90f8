"""Images, video and sound beside the text of a call: one batch of several invokes, and whose is what.

nnsight runs an encoding with media on its own; here the encodings of several invokes are joined, text padded
on the left and media one after the other, which is the order in which the wrapper scatters them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Final

import torch
from nnsight.modeling import processing
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import pad

from .errors import BadArgument
from .media_checks import MediaCount
from .processors import MULTIMODAL

__all__ = ["GIVEN_BY", "TOWERS", "MediaRows", "has_media", "join", "rows_in", "token_types"]

GIVEN_BY: Final = {
    "images": "pixel_values",
    "frames": "pixel_values_videos",
    "audios": "input_features",
}
"""What brings each kind of media into a call."""

PROCESSOR_OPTIONS: Final = frozenset(
    {"max_soft_tokens", "do_resize", "do_rescale", "rescale_factor", "do_convert_rgb", "resample"}
    | {"video_metadata", "do_sample_frames", "num_frames", "fps", "sampling_rate"}
    | {"images_kwargs", "videos_kwargs", "audio_kwargs", "text_kwargs"}
)
"""Keywords beside media that are the processor's; no forward of a Gemma 4 model has one of these names."""

TOWERS: Final[dict[str, tuple[str, ...]]] = {
    "vision": ("images", "frames"),
    "projector": ("images", "frames"),
    "audio": ("audios",),
    "audio_projector": ("audios",),
}
"""The modules that media pass on their way into the stream, and what passes them, in turn."""

_KIND_OF: Final = {
    "pixel_values": "images",
    "image_position_ids": "images",
    "pixel_values_videos": "frames",
    "video_position_ids": "frames",
    "num_frames_per_video": "videos",
    "input_features": "audios",
    "input_features_mask": "audios",
}
"""Arguments of the wrapper's call, and what their first axis counts."""

_FILL: Final = {"image_position_ids": -1, "video_position_ids": -1}
"""What media are padded with where they are of unequal length; zero where nothing is said."""

_TYPES: Final = {"image_token_id": 1, "video_token_id": 2, "audio_token_id": 3}
"""The `mm_token_type_ids` of transformers' `ProcessorMixin.create_mm_token_type_ids`."""


def has_media(inputs: Sequence[Any], kwargs: Mapping[str, Any], *, chats: bool) -> bool:
    """Whether an invoke brings media; `chats`: or is a chat, in which there may be some."""
    data = inputs[0] if inputs else None
    named = {*kwargs, *(data if isinstance(data, Mapping) else ())}
    if named & (processing.PROCESSOR_MEDIA_KEYS | _KIND_OF.keys()):
        return True
    return chats and processing.as_chats(data) is not None


def rows_in(inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """How many texts an invoke that is written for a processor brings, where nnsight counts one."""
    text = kwargs.get("text", inputs[0] if inputs else None)
    if not set(kwargs) & processing.PROCESSOR_MEDIA_KEYS or isinstance(text, Mapping):
        return None
    if isinstance(text, (list, tuple)):
        return len(text)
    images, sounds = kwargs.get("images"), kwargs.get("audio")
    if text is None and isinstance(images, (list, tuple)) and images and isinstance(images[0], (list, tuple)):
        return len(images)  # a list of images for each text that the processor makes of them
    if text is None and images is None and isinstance(sounds, (list, tuple)):
        return len(sounds)
    return 1


def token_types(config: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Which modality each token is of, as the processor says it: text, image, video or sound."""
    types = torch.zeros_like(input_ids)
    for name, number in _TYPES.items():
        token = getattr(config, name, None)
        if token is not None:
            types[input_ids == token] = number
    return types


@cache
def hands_on_frames(inner: type) -> bool:
    """Whether a forward of a wrapper's inner model, of class `inner`, tells its tower of a video's frames.

    transformers 5.20 takes `num_frames_per_video`, drops it, and then asks for it; `generate` does not.
    """
    source = inspect.getsource(inspect.unwrap(vars(inner)["forward"]))
    return "num_frames_per_video=num_frames_per_video" in source


# ---- one batch of several invokes --------------------------------------------------------------------------


def join(model: Any, invokes: list) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The call that several invokes make together, and the encoding of each."""
    each: list[dict[str, Any]] = []
    forward: dict[str, Any] = {}
    for inputs, kwargs in invokes:
        parts, options = _parts(model, inputs, kwargs)
        forward |= options
        each.append(_joined(model, parts))
    return {**_joined(model, each), **forward}, each


def _parts(
    model: Any, inputs: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The encodings of one invoke, one after the other, and what else its call is given."""
    data = inputs[0] if inputs else None
    if model.processor is not None and set(kwargs) & processing.PROCESSOR_MEDIA_KEYS:
        return _processed(model.processor, data, kwargs)
    chats = _chats_with_media(model, data)
    if chats:
        return [_templated(model.processor, chat.messages) for chat in chats], dict(kwargs)
    rows, forward = processing.preprocess_invoke(model, data, kwargs)
    if rows is not None:
        return [_tensors(row) for row in rows], forward
    arguments, encoding = forward
    if arguments or "input_ids" not in encoding:
        raise BadArgument(
            "several invokes, of which some carry images, video or sound, each need text or token ids."
        )
    tensors = _tensors(encoding)
    return [tensors], {name: value for name, value in encoding.items() if name not in tensors}


def _processed(
    processor: Any, data: Any, kwargs: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What the processor makes of an invoke's text and media, and what else its call is given."""
    if data is not None and "text" in kwargs:
        raise BadArgument("the prompt is given twice, by place and as `text=`; give one.")
    text = {} if data is None else {"text": data}
    known = processing.PROCESSOR_KEYS | PROCESSOR_OPTIONS
    call = {name: value for name, value in kwargs.items() if name in known}
    with unset_fake_temporarily():  # `scan` runs under a fake mode, in which no image can be read
        encoding = dict(processor(**text, **call, return_tensors="pt"))
    tensors = _tensors(encoding)
    return [tensors], {name: value for name, value in kwargs.items() if name not in known}


def _chats_with_media(model: Any, data: Any) -> list[Any]:
    """Chats that hold more than text, where the task's pipeline would render their text alone."""
    chats = processing.as_chats(data) or []
    if model.processor is None or model.task in MULTIMODAL:
        return []
    parts = [part for chat in chats for message in chat.messages for part in message["content"]]
    return chats if any(isinstance(part, dict) and part.get("type") != "text" for part in parts) else []


def _templated(processor: Any, messages: list[Any]) -> dict[str, torch.Tensor]:
    """A chat's encoding, with the turn of the model begun, or its last one left open."""
    open_turn = messages[-1]["role"] == "assistant"
    encoding = processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=not open_turn,
        continue_final_message=open_turn,
    )
    return _tensors(encoding)


def _tensors(encoding: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    known = {*processing.ROW_FIELDS, "mm_token_type_ids", *_KIND_OF}
    return {
        name: value for name, value in encoding.items() if name in known and isinstance(value, torch.Tensor)
    }


def _joined(model: Any, encodings: list[dict[str, Any]]) -> dict[str, Any]:
    """Several encodings as one: texts padded to one length, media to one number of patches or frames."""
    if len(encodings) == 1:
        return encodings[0]
    if any("input_ids" not in encoding for encoding in encodings):
        raise BadArgument(
            "embeddings have no place beside an invoke with images, video or sound; give token ids, or trace "
            "them alone."
        )
    encodings = [_complete(model, encoding, encodings) for encoding in encodings]
    result: dict[str, Any] = {}
    for name in dict.fromkeys(name for encoding in encodings for name in encoding):
        given = [encoding[name] for encoding in encodings if name in encoding]
        if name in _KIND_OF:
            result[name] = torch.cat(_padded(given, _FILL.get(name, 0)))
        elif name == "mm_token_type_ids":
            width = max(types.shape[1] for types in given)
            result[name] = torch.cat([pad(types, (width - types.shape[1], 0)) for types in given])
        else:
            # On the left whatever the tokenizer's side, as the processor pads the texts of one invoke.
            result[name] = processing.pad(model, name, given, left=True)
    return result


def _complete(model: Any, encoding: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """An encoding with what others have of each token: mask, types and positions."""
    ids = encoding["input_ids"]
    result = dict(encoding)
    result.setdefault("attention_mask", torch.ones_like(ids))
    fields = {name for other in others for name in other if name not in _KIND_OF}
    if "mm_token_type_ids" in fields:
        result.setdefault("mm_token_type_ids", token_types(model._module.config, ids))
    if "position_ids" in fields:
        result.setdefault("position_ids", processing.positions(result["attention_mask"]))
    missing = sorted(fields - result.keys())
    if missing:
        raise BadArgument(f"some invokes give {missing[0]} and others do not; give it in all or in none.")
    return result


def _padded(tensors: list[torch.Tensor], fill: int) -> list[torch.Tensor]:
    """Media of unequal length, padded at the end of their second axis."""
    if tensors[0].dim() < 2:
        return tensors
    width = max(tensor.shape[1] for tensor in tensors)
    after = (0, 0) * (tensors[0].dim() - 2)
    return [
        tensor if tensor.shape[1] == width else pad(tensor, (*after, 0, width - tensor.shape[1]), value=fill)
        for tensor in tensors
    ]


# ---- whose is what -----------------------------------------------------------------------------------------


class MediaRows:
    """Which images, frames and sounds of a batch are an invoke's, and which of their soft tokens.

    Of a tensor inside a tower the first axis counts media, or the soft tokens of all of them.
    """

    def __init__(
        self,
        sizes: MediaCount,
        counts: list[dict[str, int]],
        starts: Iterable[int],
        towers: Mapping[str, tuple[str, ...]],
        calls: Iterable[str],
    ) -> None:
        """sizes: soft tokens of every item. counts: items of each invoke, by kind; starts: its first row.

        towers: the beginning of a location, and the kinds that pass it, in turn. calls: locations of calls
        that take media among their arguments.
        """
        self._towers = towers
        self.calls = frozenset(calls)
        self._known: dict[str, tuple[str, ...]] = {}
        self._given = {kind for kind in _KIND_OF.values() if any(count.get(kind) for count in counts)}
        starts = list(starts)
        self._items: dict[str, dict[int, tuple[int, int, int]]] = {}
        self._tokens: dict[str, dict[int, tuple[int, int, int]]] = {}
        for kind in dict.fromkeys(_KIND_OF.values()):
            ends = list(accumulate((count.get(kind, 0) for count in counts), initial=0))
            of_item = getattr(sizes, kind)
            before = list(accumulate(of_item, initial=0))
            spans = list(zip(starts, ends[:-1], ends[1:], strict=True))
            self._items[kind] = {row: (start, end - start, ends[-1]) for row, start, end in spans}
            if len(of_item) == ends[-1]:
                self._tokens[kind] = {
                    row: (before[start], before[end] - before[start], before[-1]) for row, start, end in spans
                }

    def items(self, kind: str, group: Sequence[int]) -> tuple[int, int, int]:
        """Where an invoke's items of a kind begin, how many they are, and how many there are in all."""
        return self._items[kind][group[0]]

    def kind(self, location: str, turn: int) -> str | None:
        """What the first axis counts at a location: a kind of media, or `None` for the rows of the batch.

        turn: how often the run had passed the location before.
        """
        kinds = self._known.get(location)
        if kinds is None:
            found = next((k for start, k in self._towers.items() if location.startswith(start)), ())
            kinds = self._known[location] = tuple(kind for kind in found if kind in self._given)
        return kinds[turn % len(kinds)] if kinds else None

    @staticmethod
    def kind_of(argument: str) -> str | None:
        """What the first axis of an argument of the wrapper's call counts."""
        return _KIND_OF.get(argument)

    def cut(self, kind: str, group: Sequence[int], size: int) -> tuple[int, int, int] | None:
        """Start, length and whole of an invoke's part of an axis of length `size`, if it is one."""
        for table in (self._items, self._tokens):
            found = table.get(kind, {}).get(group[0])
            if found is not None and found[2] == size:
                return found
        return None
