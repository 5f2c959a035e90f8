"""A processor for Gemma 4 put together from those parts of transformers' own that do without torchvision.

transformers' `Gemma4Processor` wants a video processor, which is torchvision's, even where no video is ever
given. What it does with text, images, frames and sound is little: this does the same with pillow and numpy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import transformers
from transformers import BatchFeature, Gemma4ImageProcessorPil, ProcessorMixin

from .errors import BadArgument

__all__ = ["ComposedProcessor", "compose", "videos_in"]

KINDS: Final = ("image", "video", "audio")
"""In the order of their numbers in `mm_token_type_ids`; text is 0."""

_KEYWORDS: Final = {"image": "images", "video": "videos", "audio": "audio"}
_PLURALS: Final = {"image": "images", "video": "videos", "audio": "sounds"}
_VIDEO_TOKEN: Final = "<|video|>"
_FRAMES: Final = 32
_FPS: Final = 24  # transformers' guess, where the metadata name no rate

_TEXT_OPTIONS: Final = frozenset(
    {"padding", "padding_side", "truncation", "max_length", "add_special_tokens", "pad_to_multiple_of"}
    | {"return_attention_mask", "return_offsets_mapping", "return_mm_token_type_ids"}
)
_VIDEO_OPTIONS: Final = frozenset({"video_metadata", "num_frames", "fps", "do_sample_frames"})
# What `apply_chat_template` passes along, before transformers 5.24 and since.
_PASSED_ALONG: Final = frozenset({"audio_from_video_indices", "load_audio_from_video", "return_metadata"})


class ComposedProcessor(ProcessorMixin):
    """Text, images, video frames and sound as a Gemma 4 wrapper takes them.

    Called as transformers' processors are, by keyword: `text=`, `images=`, `videos=`, `audio=`. Each
    `<|image|>`, `<|video|>` and `<|audio|>` of the text stands for the next item of its kind, in reading
    order, and is written out as the tokens that the item fills; items come in one list, or in a list for each
    text. Texts are padded on the left. Images are PIL images, arrays, paths or URLs; a video is its frames,
    as images or as one array `[frames height width 3]`; pixels go from 0 to 255. Sound is an array of samples
    at the extractor's rate, from -1 to 1.

    Answers `input_ids`, `attention_mask`, `mm_token_type_ids` (0 text, 1 image, 2 video, 3 audio) and what
    the given kinds need: `pixel_values` and `image_position_ids`; `pixel_values_videos`,
    `video_position_ids` and `num_frames_per_video`; `input_features` and `input_features_mask`.

        encoding = processor(text="a cat <|image|>", images=[picture], return_tensors="pt")

    Raises: BadArgument, where placeholders and items differ in number, for a video that has to be decoded,
    for pixels from 0 to 1 without `do_rescale=False`, for samples that are whole numbers, and for an option
    that it does not know.
    """

    # Read off the tokenizer, which may lack some.
    image_token: Any
    boi_token: Any
    eoi_token: Any
    audio_token: Any
    boa_token: Any
    eoa_token: Any
    video_token: Any

    def __init__(
        self,
        tokenizer: Any,
        image_processor: Any,
        frames: Any,
        feature_extractor: Any = None,
        *,
        settings: Mapping[str, Any],
        chat_template: Any = None,
    ) -> None:
        # Not through ProcessorMixin's own, which asks the missing torchvision for the class of each part.
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.frames = frames
        self.feature_extractor = feature_extractor
        self.settings = settings
        self.chat_template = chat_template or getattr(tokenizer, "chat_template", None)
        for name in ("image_token", "boi_token", "eoi_token", "audio_token", "boa_token", "eoa_token"):
            setattr(self, name, getattr(tokenizer, name, None))
        self.video_token = _VIDEO_TOKEN if _VIDEO_TOKEN in tokenizer.get_vocab() else None
        if self.video_token and len(tokenizer.encode(self.video_token, add_special_tokens=False)) != 1:
            # In the vocabulary and not among the special tokens: transformers mends the same.
            tokenizer.add_special_tokens({"additional_special_tokens": [self.video_token]})
        for kind in KINDS:
            token = getattr(self, f"{kind}_token")
            setattr(self, f"{kind}_token_id", token and tokenizer.convert_tokens_to_ids(token))

    @property
    def model_input_names(self) -> list[str]:
        """What an answer may hold."""
        return [
            *("input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_position_ids"),
            *("pixel_values_videos", "video_position_ids", "num_frames_per_video"),
            *("input_features", "input_features_mask"),
        ]

    def __call__(
        self,
        images: Any = None,
        text: Any = None,
        videos: Any = None,
        audio: Any = None,
        *,
        return_tensors: str | None = None,
        **options: Any,
    ) -> BatchFeature:
        split = _split(options)
        given = {"image": images, "video": videos, "audio": audio}
        items = {kind: found for kind, value in given.items() if (found := self._items(kind, value))}
        for kind, home in (("image", "images"), ("video", "frames")):
            if split[home].get("do_rescale", True):
                _check_bright(kind, items.get(kind, []))
        per_row = {kind: _per_row(kind, given[kind]) for kind in items}
        rows = self._rows(text, items, per_row)
        self._check_numbers(rows, items, per_row)
        data: dict[str, Any] = {}
        written: dict[str, Iterator[str]] = {}
        if "image" in items:
            data |= self.image_processor(items["image"], **split["images"])
            sizes = data.pop("num_soft_tokens_per_image")
            written["image"] = iter([self._image(size, self.image_token) for size in sizes])
        if "video" in items:
            made, texts = self._videos(items["video"], split["frames"], split["videos"])
            data |= made
            written["video"] = iter(texts)
        if "audio" in items:
            data |= self._sounds(items["audio"], split["audio"])
            written["audio"] = iter([self._sound(mask) for mask in data["input_features_mask"]])
        rows = [self._write_out(row, written) for row in rows]
        return BatchFeature({**self._tokens(rows, split["text"]), **data}, tensor_type=return_tensors)

    # -- text ------------------------------------------------------------------------------------------------

    def _rows(
        self, text: Any, items: Mapping[str, list], per_row: Mapping[str, list[int] | None]
    ) -> list[str]:
        if text is None:
            # As transformers: a row per list of images, or per sound.
            if not items:
                raise BadArgument("the processor is given nothing: no text, no images, no videos, no audio.")
            kind, found = next(iter(items.items()))
            alone = [len(found)] if kind == "image" else [1] * len(found)
            return [" ".join([getattr(self, f"{kind}_token")] * count) for count in per_row[kind] or alone]
        rows = [text] if isinstance(text, str) else list(text)
        if not rows or not all(isinstance(row, str) for row in rows):
            raise BadArgument("the text is one string, or a list of them, one a row.")
        return rows

    def _check_numbers(
        self, rows: list[str], items: Mapping[str, list], per_row: Mapping[str, list[int] | None]
    ) -> None:
        for kind in KINDS:
            token = getattr(self, f"{kind}_token")
            wanted = [row.count(token) if token else 0 for row in rows]
            number = len(items.get(kind, ()))
            if number and not token:
                raise BadArgument(
                    f"the tokenizer has no {kind} token, so no {_KEYWORDS[kind]} can be placed."
                )
            if sum(wanted) != number:
                raise BadArgument(
                    f"the text has {sum(wanted)} {token} and {number} {_KEYWORDS[kind]} are given. Write one "
                    f"{token} where each stands: `processor(text=..., {_KEYWORDS[kind]}=[...])`."
                )
            counts, plural = per_row.get(kind), _PLURALS[kind]
            if counts is not None and len(counts) != len(rows):
                raise BadArgument(
                    f"{len(counts)} lists of {plural} are given, and {len(rows)} texts: give a list of "
                    f"{plural} for each text, `[]` where it has none, or all of them in one list."
                )
            if counts is not None and counts != wanted:
                raise BadArgument(
                    f"the rows of the text have {wanted} {token}, and the lists of {plural} {counts} "
                    f"{plural}."
                )

    def _write_out(self, row: str, written: Mapping[str, Iterator[str]]) -> str:
        tokens = {getattr(self, f"{kind}_token"): kind for kind in written}
        if not tokens:
            return row
        pattern = "|".join(re.escape(token) for token in tokens)
        return re.sub(pattern, lambda match: next(written[tokens[match.group()]]), row)

    def _tokens(self, rows: list[str], options: dict[str, Any]) -> dict[str, Any]:
        typed = options.pop("return_mm_token_type_ids", True)
        encoding = dict(self.tokenizer(rows, **{"padding": True, "padding_side": "left", **options}))
        ids = encoding["input_ids"]
        for row, tokens in zip(rows, ids, strict=True):
            for kind in KINDS:
                token, token_id = getattr(self, f"{kind}_token"), getattr(self, f"{kind}_token_id")
                if token and row.count(token) != list(tokens).count(token_id):
                    raise BadArgument(
                        f"truncation cuts {token} tokens off: {row.count(token)} are needed and "
                        f"{list(tokens).count(token_id)} are left. Give a larger `max_length`."
                    )
        if typed:
            numbers = {getattr(self, f"{kind}_token_id"): 1 + i for i, kind in enumerate(KINDS)}
            encoding["mm_token_type_ids"] = [[numbers.get(token, 0) for token in row] for row in ids]
        return encoding

    # -- items -----------------------------------------------------------------------------------------------

    def _items(self, kind: str, value: Any) -> list:
        found = [] if value is None else _each(kind, value)
        if kind == "video":
            return [_frames(video) for video in found]
        if kind == "audio":
            if found and self.feature_extractor is None:
                raise BadArgument("this processor takes no sound: it has no feature extractor.")
            return [_samples(sound) for sound in found]
        if any(image is None for image in found):
            raise BadArgument(
                "an image is None. Leave it out; a text without images has an empty list, `[]`."
            )
        return [
            self.image_processor.fetch_images(str(image) if isinstance(image, Path) else image)
            for image in found
        ]

    def _image(self, size: int, token: str) -> str:
        return f"{self.boi_token}{token * size}{self.eoi_token}"

    def _videos(
        self, videos: list[np.ndarray], frame_options: dict[str, Any], options: dict[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        metadata = _metadata(options.get("video_metadata"), videos)
        chosen = [_chosen(len(video), about, options) for video, about in zip(videos, metadata, strict=True)]
        frames = [frame for video, index in zip(videos, chosen, strict=True) for frame in video[index]]
        made = self.frames(frames, **frame_options)
        sizes, texts, start = made.pop("num_soft_tokens_per_image"), [], 0
        for about, index in zip(metadata, chosen, strict=True):
            indices = about.get("frames_indices")
            places = index if indices is None or len(indices) != len(index) else indices
            rate = about.get("fps") or _FPS
            texts.append(
                " ".join(
                    f"{_clock(place / rate)} {self._image(size, self.video_token)}"
                    for place, size in zip(places, sizes[start : start + len(index)], strict=True)
                )
            )
            start += len(index)
        data = {
            "pixel_values_videos": made["pixel_values"],
            "video_position_ids": made["image_position_ids"],
            "num_frames_per_video": [len(index) for index in chosen],
        }
        return data, texts

    def _sounds(self, sounds: list[np.ndarray], options: dict[str, Any]) -> dict[str, Any]:
        rate, heard = options.pop("sampling_rate", None), self.feature_extractor.sampling_rate
        if rate not in (None, heard):
            raise BadArgument(
                f"the sound has {rate} samples a second, and this model hears {heard}. Resample it first."
            )
        return dict(self.feature_extractor(sounds, **options))

    def _sound(self, mask: Any) -> str:
        # Gemma 4's tower halves the frames twice; the unified model takes each as a token.
        step = 1 if _unified(self.settings) else 4
        return f"{self.boa_token}{self.audio_token * int(np.asarray(mask)[::step].sum())}{self.eoa_token}"

    # -- files -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """What `processor_config.json` holds: the settings of transformers' own processor."""
        return json.loads(json.dumps(self.settings))

    def save_pretrained(self, save_directory: str | Path, *_: Any, **__: Any) -> list[str]:
        """Writes the tokenizer and the settings, as transformers' own processor does and reads them."""
        path = Path(save_directory)
        self.tokenizer.save_pretrained(path)
        file = path / "processor_config.json"
        file.write_text(json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        return [str(file)]

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.settings.get('processor_class')}"


def compose(settings: Mapping[str, Any], tokenizer: Any, *, chat_template: Any = None) -> ComposedProcessor:
    """The processor that these settings describe.

    settings: what `processor_config.json` holds; a part that is left out has transformers' defaults.
    """
    unified = _unified(settings)
    sound = settings.get("feature_extractor")
    return ComposedProcessor(
        tokenizer,
        _image_processor(settings.get("image_processor") or {}, unified, max_soft_tokens=280),
        _image_processor(settings.get("video_processor") or {}, unified, max_soft_tokens=70),
        _feature_extractor(sound, unified) if sound is not None else None,
        settings=settings,
        chat_template=chat_template,
    )


def _unified(settings: Mapping[str, Any]) -> bool:
    return settings.get("processor_class") == "Gemma4UnifiedProcessor"


def _image_processor(settings: Mapping[str, Any], unified: bool, *, max_soft_tokens: int) -> Any:
    known = Gemma4ImageProcessorPil.valid_kwargs.__annotations__
    chosen = {name: value for name, value in settings.items() if name in known and value is not None}
    chosen = {"max_soft_tokens": max_soft_tokens, "patch_size": 16, "pooling_kernel_size": 3, **chosen}
    if unified:
        # k x k patches merged are the plain patch of k times the side: rows of pixels, then colours.
        chosen["patch_size"] *= chosen["pooling_kernel_size"]
        chosen["pooling_kernel_size"] = 1
    return Gemma4ImageProcessorPil(**chosen)


def _feature_extractor(settings: Mapping[str, Any], unified: bool) -> Any:
    family = "Gemma4Unified" if unified else "Gemma4"
    return getattr(transformers, f"{family}AudioFeatureExtractor").from_dict(dict(settings))


# -- options and items --------------------------------------------------------------------------------------


def _split(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each kind, given flat or as `images_kwargs` and the like; a video's are two kinds."""
    image_options = frozenset(Gemma4ImageProcessorPil.valid_kwargs.__annotations__)
    homes = {
        "text": _TEXT_OPTIONS,
        "images": image_options,
        "frames": image_options,
        "videos": _VIDEO_OPTIONS,
        "audio": frozenset({"sampling_rate"}),
    }
    split: dict[str, dict[str, Any]] = {name: {} for name in homes}
    for name, value in options.items():
        part = name.removesuffix("_kwargs")
        if part in ("text", "images", "audio") and part != name:
            split[part] |= value
        elif name == "videos_kwargs":
            for option in value:
                split["videos" if option in _VIDEO_OPTIONS else "frames"][option] = value[option]
        elif found := [home for home, known in homes.items() if name in known]:
            for home in found:
                split[home][name] = value
        elif name not in _PASSED_ALONG:
            raise BadArgument(f"the processor has no option `{name}`.")
    return split


def _flat(value: Any) -> list:
    if isinstance(value, (list, tuple)):
        return [item for entry in value for item in _flat(entry)]
    return [value]


def _is_list(kind: str, value: Any) -> bool:
    """Whether this is a list of items, and not an item that is written as a list."""
    if not isinstance(value, (list, tuple)):
        return False
    if kind == "video":
        return not _is_video(value)
    return kind == "image" or not _is_sound(value)


def _each(kind: str, value: Any) -> list:
    """Each item of what is given, however deep in lists."""
    if kind == "video":
        return videos_in(value)
    return [item for entry in value for item in _each(kind, entry)] if _is_list(kind, value) else [value]


def _per_row(kind: str, value: Any) -> list[int] | None:
    """How many items each row is given, where they come in a list per row.

    Raises: BadArgument, where some come in lists and some do not.
    """
    lists = [_is_list(kind, entry) for entry in value] if _is_list(kind, value) else []
    if not any(lists):
        return None
    if not all(lists):
        plural = _PLURALS[kind]
        raise BadArgument(
            f"some {plural} are given in lists and some are not: give a list of {plural} for each text, `[]` "
            f"where it has none, or all of them in one list."
        )
    return [len(_each(kind, entry)) for entry in value]


def _check_bright(kind: str, items: Sequence[Any]) -> None:
    """Refuse arrays from 0 to 1, which would be taken as nearly black.

    Raises: BadArgument.
    """
    for index, item in enumerate(items):
        real = "float" in str(getattr(item, "dtype", ""))  # of an array or of a tensor
        if real and 0 not in item.shape and 0 < (largest := item.max().item()) <= 1:
            raise BadArgument(
                f"{kind} {index} has no value above {largest:.4g}, and pixels go from 0 to 255. Give "
                f"`255 * pixels`; or call the processor on its own, which takes 0 to 1 with "
                f"`do_rescale=False`, and trace what it returns."
            )


def videos_in(value: Any) -> list:
    """Each video of what is given, however deep in lists.

    Raises: BadArgument, for a file, and for what is no video.
    """
    if isinstance(value, (str, Path)):
        raise BadArgument(
            f"{value}: decoding a video takes transformers' own processor and torchvision: `pip install "
            f"gemloupe[video]`. Without them give its frames: `videos=[frames]`."
        )
    if getattr(value, "ndim", None) == 5:
        return list(value)
    if _is_video(value):
        return [value]
    if isinstance(value, (list, tuple)):
        return [video for entry in value for video in videos_in(entry)]
    raise BadArgument(
        "a video is given as its frames: a list of images, or an array [frames height width 3]; several "
        "videos as a list of these."
    )


def _is_video(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_is_frame(frame) for frame in value)
    return getattr(value, "ndim", None) == 4


def _is_frame(value: Any) -> bool:
    return getattr(value, "ndim", None) == 3 or hasattr(value, "getbands")  # an array, or a PIL image


def _frames(video: Any) -> np.ndarray:
    frames = [np.asarray(frame.convert("RGB") if hasattr(frame, "convert") else frame) for frame in video]
    if len({frame.shape for frame in frames}) > 1:
        shapes = ", ".join(sorted({str(frame.shape) for frame in frames}))
        raise BadArgument(f"the frames of a video have one size; these have {shapes}.")
    return np.stack(frames)


def _metadata(given: Any, videos: Sequence[np.ndarray]) -> list[Mapping[str, Any]]:
    metadata = [{}] * len(videos) if given is None else _flat(given)
    if len(metadata) != len(videos):
        raise BadArgument(f"{len(videos)} videos are given, and {len(metadata)} `video_metadata`.")
    return [dict(about) for about in metadata]


def _chosen(total: int, about: Mapping[str, Any], options: Mapping[str, Any]) -> np.ndarray:
    """Which frames are taken: evenly spread ones, where there are more than asked for."""
    wanted, rate = options.get("num_frames"), options.get("fps")
    if options.get("do_sample_frames", True) is False:
        wanted = total
    elif rate is not None:
        if about.get("fps") is None:
            raise BadArgument(
                "`fps` asks for so many frames a second; say how many the video has: "
                "`video_metadata={'fps': ...}`."
            )
        wanted = max(1, int(total / about["fps"] * rate))
    number = min(total, wanted or _FRAMES)
    return np.arange(number) * total // number


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def _is_sound(value: Sequence[Any]) -> bool:
    """Whether a list is one sound: plain numbers, or the samples and the rate of a file."""
    return _is_pair(value) or (bool(value) and isinstance(value[0], (int, float, np.number)))


def _is_pair(value: Any) -> bool:
    """Whether this is an array and a number, in either order, as the readers of files return them."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return False
    numbers = [isinstance(part, (int, float, np.number)) for part in value]
    return any(getattr(part, "ndim", 0) for part in value) and any(numbers)


def _samples(sound: Any) -> np.ndarray:
    """A sound's samples.  [samples]

    Raises: BadArgument, for a file, for samples with their rate, for whole numbers, for several channels.
    """
    if isinstance(sound, (str, Path)):
        raise BadArgument(
            "sound is given as its samples, an array of numbers at the model's rate: decode the file first, "
            "for example with `soundfile.read`."
        )
    if isinstance(sound, Mapping) or _is_pair(sound):
        form = "a dict that holds them" if isinstance(sound, Mapping) else "a pair of them"
        raise BadArgument(
            f"sound is given as its samples alone, at the model's rate, and not as {form} and their rate: "
            f"`audio=[samples]`."
        )
    samples = np.asarray(sound)
    if samples.dtype.kind in "iu":
        raise BadArgument(
            f"the samples of a sound go from -1 to 1, and these are {samples.dtype}. Give "
            f"`samples / 32768`, where they have 16 bits."
        )
    if samples.dtype.kind != "f":
        raise BadArgument(f"a sound is an array of samples, not {type(sound).__name__}.")
    if samples.ndim != 1:
        raise BadArgument("sound has one channel: an array [samples] each.")
    return samples.astype(np.float32)
