"""Where the tokens of an image lie in the picture, and a picture of numbers given one per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from jaxtyping import Float, Int
from nnsight.modeling import processing
from torch import Tensor

from .errors import BadArgument
from .media_checks import Span, check_media, kernel_side, patch_side
from .processors import check_media_keywords

if TYPE_CHECKING:
    from PIL.Image import Image

    from .standardized import StandardizedTransformer

__all__ = ["ImageGeometry", "image_geometry", "video_geometry"]

# From low to high: dark violet, blue, green, yellow, as matplotlib's viridis runs.
_RAMP: Final = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))

# What to take of values that are for more than the tokens of one image.
_OF_ROW: Final = "From a whole row take `values[geometry.tokens]`"
_OF_CALL: Final = "From all features of the call take `values[geometry.features]`"
_OF_PATCHES: Final = "From one per patch take `values[geometry.patches_of_token].mean(-1)`"


@dataclass(frozen=True, eq=False)
class ImageGeometry:
    """Where the soft tokens and the patches of one image, or of one video frame, lie in the picture.

    Boxes are (left, top, right, bottom) in pixels of the picture as it was given; where that is not known
    (`size` is None), of the one that the processor made of it (`resized`). Patches are counted without the
    padding, tokens from the first of the image: on 12B a patch is a token, elsewhere a token pools a square
    of `kernel` x `kernel` patches.
    """

    row: int
    """The row of the batch."""
    span: tuple[int, int]
    """Its tokens in the row, padding counted: from start to stop."""
    seq: int
    """How long the row is, padding counted."""
    features: slice
    """Its rows among the call's `vision.image_features`; for a frame, among its `vision.video_features`.

    of_this_image = image_features[geometry.features]
    """
    grid: tuple[int, int]
    """Rows and columns of soft tokens."""
    patch_grid: tuple[int, int]
    """Rows and columns of patches."""
    kernel: int
    """How many patches along a side become one token."""
    size: tuple[int, int] | None
    """Width and height of the picture as it was given."""
    resized: tuple[int, int]
    """Width and height of the picture that the patches are cut from."""
    token_of_patch: Int[Tensor, " patches"] = field(repr=False)
    """The token that each patch goes into."""
    patches_of_token: Int[Tensor, "tokens kernel_squared"] = field(repr=False)
    """The patches that each token pools."""
    patch_boxes: Float[Tensor, "patches 4"] = field(repr=False)
    """What each patch sees of the picture: left, top, right, bottom."""
    token_boxes: Float[Tensor, "tokens 4"] = field(repr=False)
    """What each token sees of the picture: left, top, right, bottom."""
    token_places: Int[Tensor, "tokens 2"] = field(repr=False)
    """Each token's row and column in the grid."""
    _lines: tuple[tuple[int, str], ...] = field(repr=False)
    """What else there may be a value for, as how many, and the line that makes one per token of it."""
    video: int | None = None
    """Which video the frame is of; None for an image."""
    frame: int | None = None
    """Which of the video's frames it is, as the video was given: of more frames than the processor takes, 32
    unless it is told otherwise, the model sees some. Where the video is not given (`size` is None), which of
    those that the model sees."""

    @property
    def tokens(self) -> slice:
        """Its tokens counted from the end of the row, which holds however far the row is padded on the left.

        stream = model.layers[3].layer_output[row, geometry.tokens]
        """
        start, stop = self.span
        return slice(start - self.seq, stop - self.seq or None)

    def heatmap(self, values: Any, image: Any = None, *, opacity: float = 0.6) -> Image:
        """A picture of one number per token: each token's box in the colour of its number.

        values: `[tokens]`, or `[rows columns]` as the grid. They run from dark violet (the smallest) to
        yellow (the largest). image: what is painted over, of any size; grey where it is left out.
        Raises: BadArgument, for another number of values, for one that is no number, for an opacity that is
        not between 0 and 1, for an image that lies on its side.
        """
        import numpy as np
        from PIL import Image

        if not 0 <= opacity <= 1:
            raise BadArgument(f"the opacity is between 0 and 1, not {opacity}.")
        colours = _colours(self._numbers(values))
        width, height = self.size or self.resized
        if image is None:
            under = np.full((height, width, 3), 128.0)
        else:
            picture = _picture(image)
            self._check_upright(picture)
            under = np.asarray(picture.convert("RGB"), dtype=np.float64)
            height, width = under.shape[:2]
        token = self._token_at(width, height).numpy()
        covered = token >= 0
        over = np.asarray(colours)[token]
        blended = np.where(covered[..., None], (1 - opacity) * under + opacity * over, under)
        return Image.fromarray(blended.round().astype(np.uint8))

    def plot(self, values: Any, image: Any = None, *, axes: Any = None, opacity: float = 0.6) -> Any:
        """The heatmap in matplotlib's axes, with a bar that says which colour is which number.

        axes: where it is drawn; matplotlib's current ones, where they are left out. Returns the axes.
        Raises: ImportError, without matplotlib; as `heatmap`.
        """
        picture, numbers = self.heatmap(values, image, opacity=opacity), self._numbers(values)
        try:
            cm, colors, pyplot = (import_module(f"matplotlib.{name}") for name in ("cm", "colors", "pyplot"))
        except ImportError as error:
            raise ImportError(
                "plotting takes matplotlib: `pip install gemloupe[viz]`; `heatmap` does without."
            ) from error
        axes = pyplot.gca() if axes is None else axes
        axes.imshow(picture)
        axes.set_axis_off()
        ramp = colors.LinearSegmentedColormap.from_list("gemloupe", [[c / 255 for c in rgb] for rgb in _RAMP])
        scale = colors.Normalize(float(numbers.min()), float(numbers.max()))
        axes.figure.colorbar(cm.ScalarMappable(scale, ramp), ax=axes)
        return axes

    def _numbers(self, values: Any) -> Tensor:
        numbers = torch.as_tensor(values).detach().double().cpu()
        count = len(self.token_boxes)
        if numbers.shape == self.grid and count == numbers.numel():
            numbers = numbers[tuple(self.token_places.T)]
        if numbers.shape != (count,):
            lines = [line for number, line in self._lines if numbers.shape == (number,)]
            raise BadArgument(
                f"a heatmap takes one number per token of the image, [{count}] or [{self.grid[0]} "
                f"{self.grid[1]}]; the values have shape {tuple(numbers.shape)}. "
                f"{'; '.join(lines) or _OF_ROW}."
            )
        if not bool(numbers.isfinite().all()):
            index = int((~numbers.isfinite()).nonzero()[0])
            raise BadArgument(f"value {index} of the heatmap is {float(numbers[index])}.")
        return numbers

    def _check_upright(self, picture: Image) -> None:
        width, height = picture.size
        if width != height and self.size == (height, width):
            raise BadArgument(
                f"the image is {width} x {height} pixels and was {height} x {width} when the processor took "
                f"it, which turns a file upright as its EXIF says: give "
                f"`PIL.ImageOps.exif_transpose(image)`, or the path."
            )

    def _token_at(self, width: int, height: int) -> Tensor:
        """Which token each pixel's centre lies in, -1 for none.  [height width]"""
        rows, columns = self.grid
        cells = torch.full((rows, columns), -1)
        cells[tuple(self.token_places.T)] = torch.arange(len(self.token_places))
        y = ((torch.arange(height, dtype=torch.float64) + 0.5) * rows / height).long()
        x = ((torch.arange(width, dtype=torch.float64) + 0.5) * columns / width).long()
        return cells[y[:, None], x]


def image_geometry(
    model: StandardizedTransformer, prompt: Any = None, /, *, images: Any = None, **given: Any
) -> list[ImageGeometry]:
    """Where the tokens of each image of a call lie in its picture: one `ImageGeometry` per image, in order.

    Called as `trace` is: with a text and its images, or with what the processor answered, to which the
    images may be added for their sizes. Of a chat give what `apply_chat_template` returns.

        [geometry] = model.image_geometry("a cat <|image|>", images=[picture])
        with model.trace("a cat <|image|>", images=[picture]):
            stream = model.layers[5].layer_output[0, geometry.tokens].save()
        geometry.heatmap(stream.norm(dim=-1), picture)

    Raises: BadArgument, without images, without a processor to prepare them, and where they do not fit the
    prompt.
    """
    encoding = _encoding(model, prompt, {"images": images, **given})
    config = model._module.config
    count = check_media(config, encoding)
    sizes = None if images is None else [_size(image) for image in _flat(images)]
    return _geometries(
        config, encoding, ("pixel_values", "image_position_ids", "images"), count.image_spans, sizes
    )


def video_geometry(
    model: StandardizedTransformer, prompt: Any = None, /, *, videos: Any = None, **given: Any
) -> list[ImageGeometry]:
    """Where the tokens of each video frame of a call lie in it: one `ImageGeometry` per frame, in order.

    Called as `image_geometry` is. `video` and `frame` say which of them it is.
    Raises: as `image_geometry`.
    """
    encoding = _encoding(model, prompt, {"videos": videos, **given})
    config = model._module.config
    count = check_media(config, encoding)
    lengths, sizes, given_videos = count.videos, None, None if videos is None else _videos(videos)
    if given_videos is not None:
        if len(given_videos) != len(count.videos):
            raise BadArgument(
                f"{len(given_videos)} videos are given, and the encoding holds {len(count.videos)}."
            )
        lengths = [len(video) for video in given_videos]
        sizes = [
            _size(video[0])
            for video, seen in zip(given_videos, count.videos, strict=True)
            for _ in range(seen)
        ]
    places = [
        (video, frame)
        for video, (length, seen) in enumerate(zip(lengths, count.videos, strict=True))
        for frame in _frames_taken(video, length, seen)
    ]
    names = ("pixel_values_videos", "video_position_ids", "videos")
    return _geometries(config, encoding, names, count.frame_spans, sizes, places)


def _frames_taken(video: int, length: int, seen: int) -> list[int]:
    """Which frames of a video the processor takes, spread as `composed` and transformers' own spread them."""
    if seen > length:
        raise BadArgument(f"video {video} has {length} frames, and the encoding holds {seen} of it.")
    return [index * length // seen for index in range(seen)]


def _encoding(model: Any, prompt: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What the model would be called with: what is given, or what the processor makes of it."""
    given = {name: value for name, value in given.items() if value is not None}
    if processing.as_chats(prompt) is not None:
        raise BadArgument(
            "the geometry of a chat is read off its encoding: give what `processor.apply_chat_template(chat, "
            'tokenize=True, return_dict=True, return_tensors="pt")` returns.'
        )
    if isinstance(prompt, Mapping):
        given = {**prompt, **given}
    elif prompt is not None:
        given["text"] = prompt
    if "input_ids" in given or "pixel_values" in given or "pixel_values_videos" in given:
        return {name: value for name, value in given.items() if name not in ("images", "videos")}
    check_media_keywords(model.processor, model.plan.wrapper, set(given))
    if model.processor is None:
        raise BadArgument("give an encoding that holds images, or a text with `images=` or `videos=`.")
    return dict(model.processor(**given, return_tensors="pt"))


def _geometries(
    config: Any,
    encoding: Mapping[str, Any],
    names: tuple[str, str, str],
    spans: Sequence[Span],
    sizes: Sequence[tuple[int, int]] | None,
    places: Sequence[tuple[int, int]] | None = None,
) -> list[ImageGeometry]:
    values, beside, keyword = names
    if values not in encoding:
        raise BadArgument(f"there is nothing to lay out: no {values} in the encoding, and no `{keyword}=`.")
    if not spans:
        raise BadArgument("the geometry takes the prompt as token ids: give `input_ids` of it too.")
    positions = encoding[beside]
    if sizes is not None and len(sizes) != len(positions):
        raise BadArgument(f"{len(sizes)} {keyword} are given, and the encoding holds {len(positions)}.")
    seq = encoding["input_ids"].shape[-1]
    side, kernel = patch_side(config), kernel_side(config)
    ends = list(accumulate((span.stop - span.start for span in spans), initial=0))
    return [
        _geometry(
            span,
            seq,
            ends[index],
            ends[-1],
            positions[index].cpu(),
            side,
            kernel,
            None if sizes is None else sizes[index],
            (None, None) if places is None else places[index],
        )
        for index, span in enumerate(spans)
    ]


def _geometry(
    span: Span,
    seq: int,
    first: int,
    features: int,
    positions: Tensor,
    side: int,
    kernel: int,
    size: tuple[int, int] | None,
    place: tuple[int | None, int | None],
) -> ImageGeometry:
    x, y = positions[(positions != -1).all(-1)].long().unbind(-1)
    columns, rows = int(x.max()) + 1, int(y.max()) + 1
    if kernel == 1:
        token_of_patch = torch.arange(len(x))
        cell = y * columns + x
    else:
        # Gemma4VisionPooler numbers the squares of the grid row by row, and drops the empty ones.
        cell, token_of_patch = (y // kernel * (columns // kernel) + x // kernel).unique(return_inverse=True)
    cells = columns // kernel
    token_places = torch.stack([cell // cells, cell % cells], dim=-1)
    resized = (columns * side, rows * side)
    width, height = size or resized
    patches = torch.stack([y, x], dim=-1)
    return ImageGeometry(
        row=span.row,
        span=(span.start, span.stop),
        seq=seq,
        features=slice(first, first + span.stop - span.start),
        grid=(rows // kernel, cells),
        patch_grid=(rows, columns),
        kernel=kernel,
        size=size,
        resized=resized,
        token_of_patch=token_of_patch,
        patches_of_token=token_of_patch.argsort(stable=True).reshape(-1, kernel**2),
        patch_boxes=_boxes(patches, width / columns, height / rows),
        token_boxes=_boxes(token_places, width / columns * kernel, height / rows * kernel),
        token_places=token_places,
        _lines=((features, _OF_CALL), (seq, _OF_ROW), *((n, _OF_PATCHES) for n in {len(x), len(positions)})),
        video=place[0],
        frame=place[1],
    )


def _boxes(places: Tensor, width: float, height: float) -> Tensor:
    """(left, top, right, bottom) of the cells at these rows and columns."""
    scale = torch.tensor([width, height, width, height])
    corners = torch.cat([places.flip(-1), places.flip(-1) + 1], dim=-1)
    return corners * scale


# -- pictures -----------------------------------------------------------------------------------------------


def _colours(numbers: Tensor) -> Tensor:
    """Each number's colour on the ramp.  [tokens 3]"""
    low, high = numbers.min(), numbers.max()
    along = (numbers - low) / (high - low) if high > low else torch.zeros_like(numbers)
    ramp = torch.tensor(_RAMP, dtype=torch.float64)
    place = along * (len(ramp) - 1)
    before = place.long().clamp(max=len(ramp) - 2)
    return torch.lerp(ramp[before], ramp[before + 1], (place - before)[:, None])


def _flat(images: Any) -> list:
    if isinstance(images, (list, tuple)):
        return [image for entry in images for image in _flat(entry)]
    return [images]


def _videos(videos: Any) -> list:
    from .composed import videos_in

    return videos_in(videos)


def _picture(image: Any) -> Image:
    """The image as pillow's."""
    import numpy as np
    from PIL import Image

    if isinstance(image, (str, Path)):
        from transformers.image_utils import load_image

        return load_image(str(image))
    if isinstance(image, Image.Image):
        return image
    pixels = np.asarray(image)
    return Image.fromarray(pixels.transpose(1, 2, 0) if _channels_first(pixels.shape) else pixels)


def _size(image: Any) -> tuple[int, int]:
    """Width and height of a PIL image, a file, or an array, channels first or last."""
    if isinstance(image, (str, Path)):
        return _picture(image).size
    if not hasattr(image, "ndim"):
        return image.size
    shape = tuple(image.shape)
    height, width = shape[1:] if _channels_first(shape) else shape[:2]
    return width, height


def _channels_first(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] in (1, 3) and shape[2] not in (1, 3)
