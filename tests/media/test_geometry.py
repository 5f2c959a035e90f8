"""Where tokens lie in the picture: against pictures that say it themselves, and transformers' pooling."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import gemloupe
from gemloupe.errors import BadArgument
from gemloupe.geometry import ImageGeometry
from gemloupe.testing import tiny, tiny_image, tiny_processor, tiny_sound, tiny_tokenizer, tiny_video
from tests.media.by_hand import films, ids, pictures
from tests.media.given import with_video

SHAPES = ("e2b", "31b", "12b")
every_shape = pytest.mark.parametrize("shape", SHAPES)
SIZES = [(48, 32), (160, 24), (24, 160), (77, 53), (2, 2), (640, 9)]


def slope(width: int, height: int) -> Image.Image:
    """A picture that says where one is: red is how far right, green how far down."""
    x, y = (np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height
    red, green = np.broadcast_to(x, (height, width)), np.broadcast_to(y[:, None], (height, width))
    return Image.fromarray((np.stack([red, green, 0 * red], -1) * 255).round().astype(np.uint8))


def centres(boxes: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The middle of each box, as a share of the picture."""
    left, top, right, bottom = boxes.unbind(-1)
    return torch.stack([(left + right) / 2 / size[0], (top + bottom) / 2 / size[1]], -1)


@every_shape
@pytest.mark.parametrize("size", SIZES)
def test_boxes_are_where_the_picture_says(shape, size):
    model, picture = tiny(shape, wrapper=True), slope(*size)
    given = tiny_processor(shape)(text="a <|image|>", images=picture, return_tensors="pt")
    [geometry] = model.image_geometry(given, images=picture)
    side = 8 if shape == "12b" else 4
    count = len(geometry.patch_boxes)
    patches = given["pixel_values"][0][:count].reshape(count, side * side, 3).mean(1)[:, :2]
    # A share of 1/255 by rounding, and what the resizing smears at the rim of a small picture.
    allowed = 0.01 + 0.5 / min(size)
    assert (patches - centres(geometry.patch_boxes, size)).abs().max() < allowed
    tokens = patches[geometry.patches_of_token].mean(1)
    assert (tokens - centres(geometry.token_boxes, size)).abs().max() < allowed


@every_shape
@pytest.mark.parametrize("size", SIZES)
def test_boxes_tile_the_picture(shape, size):
    picture = tiny_image(*size)
    [geometry] = tiny(shape, wrapper=True).image_geometry("<|image|>", images=[picture])
    assert geometry.size == size
    for boxes, (rows, columns) in (
        (geometry.token_boxes, geometry.grid),
        (geometry.patch_boxes, geometry.patch_grid),
    ):
        assert len(boxes) == rows * columns
        width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
        assert torch.allclose(width, torch.tensor(size[0] / columns))
        assert torch.allclose(height, torch.tensor(size[1] / rows))
        assert torch.equal(boxes.unique(dim=0).sort(0).values[0], boxes.amin(0))
        assert len(boxes[:, :2].unique(dim=0)) == len(boxes)
        assert (boxes[:, :2] >= 0).all()
        assert (boxes[:, 2:] <= torch.tensor(size) + 1e-3).all()
    k = 1 if shape == "12b" else 2
    assert geometry.kernel == k
    assert geometry.patch_grid == (k * geometry.grid[0], k * geometry.grid[1])
    side = 8 // k
    assert geometry.resized == (geometry.patch_grid[1] * side, geometry.patch_grid[0] * side)
    assert sorted(geometry.patches_of_token.flatten().tolist()) == [*range(len(geometry.patch_boxes))]
    for token, patches in enumerate(geometry.patches_of_token):
        assert (geometry.token_of_patch[patches] == token).all()
        box = geometry.patch_boxes[patches]
        assert torch.allclose(box[:, :2].amin(0), geometry.token_boxes[token, :2])
        assert torch.allclose(box[:, 2:].amax(0), geometry.token_boxes[token, 2:])


@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_pooled_from_their_patches(size):
    """transformers' pooler is given patches that hold their own number."""
    model: Any = tiny("31b", wrapper=True)
    given = tiny_processor("31b")(text="<|image|>", images=tiny_image(*size), return_tensors="pt")
    [geometry] = model.image_geometry(given)
    positions = given["image_position_ids"]
    count, padded = len(geometry.token_of_patch), positions.shape[1]
    hidden = torch.zeros(1, padded, padded)
    hidden[0, torch.arange(count), torch.arange(count)] = 1
    pooled, mask = model._module.model.vision_tower.pooler(
        hidden, positions, (positions == -1).all(-1), output_length=padded // 4
    )
    for token, row in enumerate(pooled[mask]):
        assert row.nonzero().flatten().tolist() == sorted(geometry.patches_of_token[token].tolist())


def test_a_token_of_the_unified_model_is_its_patch():
    """Blackening a token's box changes the feature of this token and of no other."""
    model: Any = tiny("12b", wrapper=True)
    picture = np.asarray(tiny_image(80, 56)).copy()  # 10 by 7 patches: close to the size it is resized to
    [geometry] = model.image_geometry("<|image|>", images=[picture])
    left, top, right, bottom = geometry.token_boxes[23].round().int().tolist()
    changed = picture.copy()
    changed[top + 2 : bottom - 2, left + 2 : right - 2] = 255
    one, other = (
        model._module.model.get_image_features(
            *(
                tiny_processor("12b")(images=[image], return_tensors="pt")[name]
                for name in ("pixel_values", "image_position_ids")
            ),
            return_dict=True,
        ).pooler_output[0]
        for image in (picture, changed)
    )
    assert ((one - other).abs().amax(-1) > 1e-3).nonzero().flatten().tolist() == [23]


# -- where in the text ---------------------------------------------------------------------------------------


@every_shape
def test_spans_of_several_images_in_several_rows(shape):
    model, image_id = tiny(shape, wrapper=True), tiny_tokenizer().get_vocab()["<|image|>"]
    images = [tiny_image(48, 32), tiny_image(20, 90), tiny_image(9, 9)]
    text = ["a long text that comes before <|image|>", "<|image|> and <|image|>"]
    given = tiny_processor(shape)(text=text, images=images, return_tensors="pt")
    found = model.image_geometry(given, images=images)
    assert [geometry.row for geometry in found] == [0, 1, 1]
    assert [geometry.size for geometry in found] == [(48, 32), (20, 90), (9, 9)]
    covered = torch.zeros_like(given["input_ids"], dtype=torch.bool)
    for geometry in found:
        start, stop = geometry.span
        assert stop - start == geometry.grid[0] * geometry.grid[1] == len(geometry.token_boxes)
        covered[geometry.row, start:stop] = True
        assert given["input_ids"][geometry.row, geometry.tokens].tolist() == [image_id] * (stop - start)
    assert torch.equal(covered, given["input_ids"] == image_id)
    # Further padding on the left, as beside a longer prompt, leaves `tokens` where it was.
    wider = torch.nn.functional.pad(given["input_ids"], (7, 0))
    assert (wider[found[1].row, found[1].tokens] == image_id).all()
    again = model.image_geometry(text, images=images)
    assert [(g.row, g.span, g.grid, g.size) for g in again] == [
        (g.row, g.span, g.grid, g.size) for g in found
    ]


@every_shape
def test_an_image_at_the_very_end(shape):
    given = {"input_ids": ids([4])[:, :-1], **pictures(shape, (2, 2))}
    [geometry] = tiny(shape, wrapper=True).image_geometry(given)
    assert geometry.tokens == slice(-4, None)
    assert (geometry.size, geometry.grid) == (None, (2, 2))
    assert geometry.resized == (16, 16)
    assert geometry.token_boxes[3].tolist() == [8, 8, 16, 16]


@every_shape
def test_images_that_touch(shape):
    given = {"input_ids": ids([10], [3]), **pictures(shape, (3, 2), (2, 2), (3, 1))}
    found = tiny(shape, wrapper=True).image_geometry(given)
    assert [geometry.span for geometry in found] == [(2, 8), (8, 12), (9, 12)]
    assert [geometry.grid for geometry in found] == [(2, 3), (2, 2), (1, 3)]


def test_the_text_by_keyword():
    model, call = tiny("e2b", wrapper=True), {"images": [tiny_image()]}
    [geometry], [same] = (
        model.image_geometry(text="abc <|image|>", **call),
        model.image_geometry("abc <|image|>", **call),
    )
    assert geometry.span == same.span


def test_patches_in_another_order():
    """A token of the unified model is the patch at its place; elsewhere tokens follow the grid."""
    for shape in SHAPES:
        given = {"input_ids": ids([6]), **pictures(shape, (3, 2))}
        model = tiny(shape, wrapper=True)
        [plain] = model.image_geometry(given)
        count = len(plain.patch_boxes)
        turned = given | {"image_position_ids": given["image_position_ids"].clone()}
        turned["image_position_ids"][0, :count] = given["image_position_ids"][0, :count].flip(0)
        [geometry] = model.image_geometry(turned)
        assert torch.equal(geometry.patch_boxes, plain.patch_boxes.flip(0))
        tokens = plain.token_boxes.flip(0) if shape == "12b" else plain.token_boxes
        assert torch.equal(geometry.token_boxes, tokens)
        corners = geometry.patch_boxes[geometry.patches_of_token]
        assert torch.equal(corners[..., :2].amin(1), geometry.token_boxes[:, :2])


@every_shape
def test_frames_of_videos(shape):
    model, video_id = tiny(shape, wrapper=True), tiny_tokenizer().get_vocab()["<|video|>"]
    videos = [tiny_video(2, 48, 32), tiny_video(1, 20, 60)]
    given = tiny_processor(shape)(text=["<|video|>", "a <|video|>"], videos=videos, return_tensors="pt")
    found = model.video_geometry(given, videos=videos)
    assert [(g.row, g.video, g.frame) for g in found] == [(0, 0, 0), (0, 0, 1), (1, 1, 0)]
    assert [g.size for g in found] == [(48, 32), (48, 32), (20, 60)]
    for geometry in found:
        assert (given["input_ids"][geometry.row, geometry.tokens] == video_id).all()
        assert geometry.token_boxes[-1, 2:].tolist() == pytest.approx(geometry.size)
    same = model.video_geometry(["<|video|>", "a <|video|>"], videos=videos)
    assert [(g.span, g.size) for g in same] == [(g.span, g.size) for g in found]
    assert [g.size for g in model.video_geometry(given)] == [None] * 3
    touching = {"input_ids": ids([8], kind="video"), **films(shape, (2, 2, 2))}
    assert [g.span for g in model.video_geometry(touching)] == [(2, 6), (6, 10)]


def test_frames_are_numbered_as_the_video_was_given():
    """By the features: the frames whose change is seen are those that the geometry names, in its order."""
    model: Any = tiny("e2b", wrapper=True)
    film = np.zeros((40, 8, 8, 3), np.uint8)
    found = model.video_geometry("<|video|>", videos=[film])
    frames = [geometry.frame for geometry in found]
    assert len(frames) == 32

    def seen(video: np.ndarray) -> torch.Tensor:
        given = tiny_processor("e2b")(text="<|video|>", videos=[video], return_tensors="pt")
        return given["pixel_values_videos"].flatten(1)

    plain, moved = seen(film), {}
    for frame in range(40):
        changed = film.copy()
        changed[frame] = 255
        moved[frame] = (seen(changed) != plain).any(-1).nonzero().flatten().tolist()
    assert {frame: seen for frame, seen in moved.items() if seen} == {f: [i] for i, f in enumerate(frames)}
    given = tiny_processor("e2b")(text="<|video|>", videos=[film], num_frames=4, return_tensors="pt")
    pictures_ = [Image.fromarray(frame) for frame in film]
    assert [g.frame for g in model.video_geometry(given, videos=[pictures_])] == [0, 10, 20, 30]
    assert [g.frame for g in model.video_geometry(given)] == [0, 1, 2, 3]
    with pytest.raises(BadArgument, match="video 0 has 3 frames, and the encoding holds 4 of it"):
        model.video_geometry(given, videos=[film[:3]])


@with_video
@every_shape
def test_features_of_each_image(shape):
    model: Any = tiny(shape, wrapper=True)
    images, videos = (
        [tiny_image(48, 32), tiny_image(20, 90), tiny_image(9, 9)],
        [tiny_video(2), tiny_video(1)],
    )
    call = {"images": images, "videos": videos}
    text = ["<|video|> of <|image|>", "<|image|> and <|image|> <|video|>"]
    found, frames = model.image_geometry(text, **call), model.video_geometry(text, **call)
    given = tiny_processor(shape)(text=text, **call, return_tensors="pt")
    kinds = {"vision.image_features": found, "vision.video_features": frames}
    for name, places in kinds.items():
        features = model.collect(given, name)[name]
        assert features.shape[0] == places[-1].features.stop
        for geometry in places:
            if name == "vision.image_features":
                alone = model.collect("<|image|>", name, images=[images[found.index(geometry)]])[name]
            else:
                film = videos[geometry.video][geometry.frame][None]
                alone = model.collect("<|video|>", name, videos=[film])[name]
            mine = features[geometry.features]
            assert mine.shape == alone.shape
            assert torch.allclose(mine, alone, atol=1e-4)


@pytest.mark.parametrize(
    "image",
    [
        tiny_image(30, 20),
        np.zeros((20, 30, 3), np.uint8),
        np.zeros((3, 20, 30), np.uint8),
        torch.zeros(3, 20, 30, dtype=torch.uint8),
    ],
    ids=["pillow", "channels last", "channels first", "tensor"],
)
def test_sizes_of_every_form(image):
    [geometry] = tiny("e2b", wrapper=True).image_geometry("<|image|>", images=[image])
    assert geometry.size == (30, 20)


def test_the_size_of_a_file(tmp_path):
    tiny_image(30, 20).save(tmp_path / "picture.png")
    [geometry] = tiny("e2b", wrapper=True).image_geometry("<|image|>", images=[str(tmp_path / "picture.png")])
    assert geometry.size == (30, 20)


def test_it_goes_with_a_trace():
    model: Any = tiny("e2b", wrapper=True)
    call = {"images": [tiny_image()]}
    [geometry] = model.image_geometry("a <|image|> b", **call)
    with model.trace("a <|image|> b", **call):
        stream = model.layers[2].layer_output[0, geometry.tokens].save()
    picture = geometry.heatmap(stream.norm(dim=-1), call["images"][0])
    assert picture.size == (48, 32)
    assert isinstance(geometry, gemloupe.ImageGeometry)
    assert "token_boxes" not in repr(geometry)
    assert "grid=" in repr(geometry)


# -- refusals ------------------------------------------------------------------------------------------------


def refusal(model: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(BadArgument) as caught:
        model.image_geometry(*args, **kwargs)
    return str(caught.value)


def test_what_cannot_be_laid_out():
    model, given = tiny("e2b", wrapper=True), {"input_ids": ids([4]), **pictures("e2b", (2, 2))}
    assert "2 images are given, and the encoding holds 1" in refusal(model, given, images=[tiny_image()] * 2)
    assert "no pixel_values in the encoding, and no `images=`" in refusal(model, "a cat")
    assert "takes the prompt as token ids" in refusal(
        model, {"pixel_values": given["pixel_values"], "image_position_ids": given["image_position_ids"]}
    )
    assert "the prompt has 3 image tokens" in refusal(model, given | {"input_ids": ids([3])})
    assert "this is the text model alone" in refusal(tiny("e2b"), "<|image|>", images=[tiny_image()])
    assert "this is the text model alone" in refusal(tiny("e2b"), given)
    assert "give an encoding that holds images" in refusal(tiny("e2b"), "a cat")
    films_ = {"input_ids": ids([8], kind="video"), **films("e2b", (2, 2, 2))}
    with pytest.raises(BadArgument, match="2 videos are given, and the encoding holds 1"):
        model.video_geometry(films_, videos=[tiny_video(2), tiny_video(2)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(5), "one number per token of the image, [6] or [2 3]; the values have shape (5,)"),
        (torch.zeros(6, 2), "the values have shape (6, 2). From a whole row take `values[geometry.tokens]`"),
        (torch.zeros(3, 2), "the values have shape (3, 2)"),
        (torch.tensor([0, 1, 2, float("nan"), 4, 5]), "value 3 of the heatmap is nan"),
    ],
    ids=["few", "wide", "turned", "nan"],
)
def test_values_that_fit_no_picture(values, message):
    given = {"input_ids": ids([6]), **pictures("e2b", (3, 2))}
    [geometry] = tiny("e2b", wrapper=True).image_geometry(given)
    with pytest.raises(BadArgument, match=re.escape(message)):
        geometry.heatmap(values)
    with pytest.raises(BadArgument, match="opacity is between 0 and 1, not 2"):
        geometry.heatmap(torch.zeros(6), opacity=2)


def test_values_of_something_else_say_what_to_take():
    model: Any = tiny("e2b", wrapper=True)
    images = [tiny_image(48, 32), tiny_image(20, 90)]
    text = "a <|image|> and <|image|> of it"
    name, tower = "vision.image_features", "vision.layers[0].layer_output"
    _, geometry = model.image_geometry(text, images=images)
    read = model.collect(text, [name, tower, "logits"], images=images)
    patches = read[tower][1].norm(dim=-1)
    real = patches[: len(geometry.patch_boxes)]
    cases = {
        "geometry.features": read[name].norm(dim=-1),
        "geometry.tokens": read["logits"][0].norm(dim=-1),
        "geometry.patches_of_token": real,
        "geometry.patches_of_token].mean(-1)": patches,
    }
    for line, values in cases.items():
        with pytest.raises(BadArgument, match=re.escape(f"`values[{line}")):
            geometry.heatmap(values)
    for values in (cases["geometry.features"][geometry.features], real[geometry.patches_of_token].mean(-1)):
        geometry.heatmap(values)


def test_a_picture_on_its_side(tmp_path):
    stored, path = tiny_image(60, 30), tmp_path / "turned.jpg"
    exif = stored.getexif()
    exif[0x0112] = 6
    stored.save(path, exif=exif)
    [geometry] = tiny("e2b", wrapper=True).image_geometry("<|image|>", images=[path])
    assert geometry.size == (30, 60)
    values = range(len(geometry.token_boxes))
    with Image.open(path) as opened, pytest.raises(BadArgument, match="60 x 30 pixels and was 30 x 60 when"):
        geometry.heatmap(values, opened)
    with Image.open(path) as opened:
        upright = ImageOps.exif_transpose(opened)
    for image in (path, upright, tiny_image(60, 31), tiny_image(15, 30)):
        geometry.heatmap(values, image)
    [square] = tiny("e2b", wrapper=True).image_geometry("<|image|>", images=[tiny_image(30, 30)])
    square.heatmap(range(len(square.token_boxes)), tiny_image(30, 30))


@pytest.mark.parametrize(("wrong", "right"), [("image", "images"), ("video", "videos"), ("audios", "audio")])
def test_keywords_of_other_processors(wrong, right):
    model: Any = tiny("e2b", wrapper=True)
    items = {"image": tiny_image(), "video": tiny_video(2), "audios": tiny_sound()}
    call: dict[str, Any] = {wrong: [items[wrong]]}
    wanted = f"takes no `{wrong}=`. Did you mean `{right}`?"
    text = f"<|{right.removesuffix('s')}|>"
    with pytest.raises(BadArgument, match=re.escape(wanted)), model.trace(text, **call):
        model.logits.save()
    with pytest.raises(BadArgument, match=re.escape(wanted)):
        model.collect(text, "logits", **call)
    assert wanted in refusal(model, text, **call)


def test_the_geometry_of_a_chat():
    model: Any = tiny("e2b", wrapper=True)
    picture = tiny_image()
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What?"}]
    chat = [{"role": "user", "content": content}]
    for form in (chat, [chat, chat]):
        assert "give what `processor.apply_chat_template(chat, tokenize=True" in refusal(model, form)
    given = model.processor.apply_chat_template(
        chat, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    [geometry] = model.image_geometry(given, images=[picture])
    assert geometry.size == picture.size


# -- heatmaps ------------------------------------------------------------------------------------------------


def geometry_of(shape: str, columns: int, rows: int) -> ImageGeometry:
    given = {"input_ids": ids([columns * rows]), **pictures(shape, (columns, rows))}
    [geometry] = tiny(shape, wrapper=True).image_geometry(given)
    return geometry


@every_shape
def test_a_heatmap_colours_each_box(shape):
    geometry = geometry_of(shape, 3, 2)
    picture = np.asarray(geometry.heatmap([0.0, 1, 2, 3, 4, 8], opacity=1))
    assert picture.shape == (16, 24, 3)
    colours = []
    for left, top, right, bottom in geometry.token_boxes.int().tolist():
        box = picture[top:bottom, left:right].reshape(-1, 3)
        assert (box == box[0]).all()
        colours.append(tuple(box[0].tolist()))
    assert len({*colours}) == 6
    assert (colours[0], colours[4], colours[5]) == ((68, 1, 84), (33, 145, 140), (253, 231, 37))
    as_grid = geometry.heatmap(torch.tensor([[0.0, 1, 2], [3, 4, 8]], requires_grad=True), opacity=1)
    assert (np.asarray(as_grid) == picture).all()
    flat = np.asarray(geometry.heatmap(torch.ones(6), opacity=1))
    assert (flat == (68, 1, 84)).all()


def test_a_heatmap_lies_over_the_picture():
    geometry, under = geometry_of("e2b", 3, 2), tiny_image(60, 31)
    clear = geometry.heatmap(range(6), under, opacity=0)
    assert (np.asarray(clear) == np.asarray(under)).all()
    full = np.asarray(geometry.heatmap(range(6), under, opacity=1))
    assert full.shape == (31, 60, 3)
    assert (full[:, :20] == full[:, :1]).all()
    assert (full[14, 0] == full[0, 0]).all()
    assert (full[16, 0] != full[0, 0]).any()
    half = np.asarray(geometry.heatmap(range(6), under, opacity=0.5)).astype(float)
    assert np.abs(half - (np.asarray(under) + full.astype(float)) / 2).max() <= 1
    for form in (np.asarray(under), torch.tensor(np.asarray(under)).permute(2, 0, 1)):
        assert (np.asarray(geometry.heatmap(range(6), form, opacity=0)) == np.asarray(under)).all()


def test_plotting_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"^plotting takes matplotlib: `pip install gemloupe\[viz\]`"):
        geometry_of("e2b", 2, 2).plot(range(4))


def test_plotting_with_a_stand_in(monkeypatch):
    done: list[Any] = []

    def record(name: str) -> Any:
        return lambda *args, **kwargs: done.append((name, args, kwargs)) or name

    axes = SimpleNamespace(
        imshow=record("imshow"), set_axis_off=record("off"), figure=SimpleNamespace(colorbar=record("bar"))
    )
    ramp = SimpleNamespace(from_list=record("ramp"))
    parts = {
        "cm": SimpleNamespace(ScalarMappable=record("mappable")),
        "colors": SimpleNamespace(LinearSegmentedColormap=ramp, Normalize=record("scale")),
        "pyplot": SimpleNamespace(gca=lambda: axes),
    }
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(**parts))
    for name, part in parts.items():
        monkeypatch.setitem(sys.modules, f"matplotlib.{name}", part)
    geometry = geometry_of("e2b", 2, 2)
    assert geometry.plot([3, 1, 2, 7]) is axes
    assert [name for name, *_ in done] == ["imshow", "off", "ramp", "scale", "mappable", "bar"]
    assert done[3][1] == (1.0, 7.0)
    assert (np.asarray(done[0][1][0]) == np.asarray(geometry.heatmap([3, 1, 2, 7]))).all()
