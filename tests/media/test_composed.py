"""The composed processor against transformers' own, and against patches cut out by hand."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from transformers.video_utils import VideoMetadata

from gemloupe.composed import compose
from gemloupe.errors import BadArgument
from gemloupe.testing import tiny_image, tiny_processor, tiny_sound, tiny_tokenizer, tiny_video

SHAPES = ("e2b", "12b")
both = pytest.mark.parametrize("shape", SHAPES)


@pytest.fixture
def theirs(monkeypatch):
    """transformers' processor of a shape, made to do without its video processor."""
    try:
        classes = {"e2b": transformers.Gemma4Processor, "12b": transformers.Gemma4UnifiedProcessor}
    except (ImportError, AttributeError, ModuleNotFoundError):
        pytest.skip("before transformers 5.24 its processor's module cannot be imported without torchvision")
    monkeypatch.setattr(transformers.ProcessorMixin, "check_argument_for_proper_class", lambda *_: object)

    def make(shape: str) -> Any:
        ours = tiny_processor(shape)
        return classes[shape](
            feature_extractor=ours.feature_extractor,
            image_processor=ours.image_processor,
            tokenizer=tiny_tokenizer(),
            video_processor=lambda videos, **_: ours("<|video|>" * len(videos), videos=videos),
        )

    return make


def assert_same(ours: Any, others: Any) -> None:
    assert {*ours} == {*others}
    for name in others:
        assert ours[name].dtype == others[name].dtype, name
        assert torch.equal(ours[name], others[name]), name


CALLS: dict[str, dict[str, Any]] = {
    "an image": {"text": "a <|image|> b", "images": tiny_image()},
    "images alone": {"images": [tiny_image(), tiny_image(90, 20, seed=2)]},
    "rows": {
        "text": ["<|image|>", "two: <|image|><|image|>", "none"],
        "images": [[tiny_image()], [tiny_image(9, 60), tiny_image(500, 5)], []],
    },
    "sound": {"text": ["<|audio|>", "and <|audio|>"], "audio": [tiny_sound(0.1), tiny_sound(0.3)]},
    "sound alone": {"audio": [tiny_sound(0.1)]},
    "both": {"text": "<|audio|><|image|> x", "images": [tiny_image()], "audio": [tiny_sound(0.1)]},
    "text": {"text": ["a", "abc"]},
    "one text": {"text": "a"},
    "options": {
        "text": "<|image|>",
        "images": tiny_image(),
        "max_soft_tokens": 140,
        "add_special_tokens": False,
    },
    "nested options": {
        "text": "<|image|>",
        "images": tiny_image(),
        "images_kwargs": {"max_soft_tokens": 140},
    },
}


@both
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_as_transformers_answers(shape, call, theirs):
    assert_same(
        tiny_processor(shape)(**call, return_tensors="pt"), theirs(shape)(**call, return_tensors="pt")
    )


@both
@pytest.mark.parametrize("about", [None, {"fps": 0.01}, {"fps": 2.0, "frames_indices": [0, 130, 7400]}])
def test_a_video_is_written_out_as_transformers_writes_it(shape, about, theirs):
    given = tiny_processor(shape)(text="see <|video|>", videos=tiny_video(3), video_metadata=about)
    ids = given["input_ids"][0]
    tokens = ids.count(tiny_tokenizer().get_vocab()["<|video|>"])
    metadata = VideoMetadata(**{"total_num_frames": 3, "frames_indices": [0, 1, 2], **(about or {})})
    made = {"num_soft_tokens_per_video": [tokens // 3], "video_metadata": [metadata]}
    text = theirs(shape).replace_video_token(made, 0)
    assert tiny_tokenizer().decode(ids) == f"<bos>see {text}"
    assert given["num_frames_per_video"] == [3]


@both
@pytest.mark.parametrize("size", [(48, 32), (37, 61), (600, 5), (5, 600), (3, 3), (1, 1)])
def test_patches_are_cut_from_the_resized_picture(shape, size):
    """By hand: the picture resized by pillow, cut into squares row by row; a merged patch is one square."""
    picture = tiny_image(*size)
    given = tiny_processor(shape)(images=picture, return_tensors="pt")
    positions, patches = given["image_position_ids"][0], given["pixel_values"][0]
    real = (positions != -1).all(-1)
    side = 8 if shape == "12b" else 4
    columns, rows = (positions[real].amax(0) + 1).tolist()
    resized = picture.resize((columns * side, rows * side), Image.Resampling.BICUBIC)
    pixels = np.asarray(resized, dtype=np.float64) / 255
    for index in range(columns * rows):
        x, y = positions[index].tolist()
        assert (x, y) == (index % columns, index // columns)
        square = pixels[y * side : (y + 1) * side, x * side : (x + 1) * side]
        assert np.allclose(patches[index].numpy(), square.reshape(-1), atol=1e-6)
    assert not real[columns * rows :].any()
    assert (patches[columns * rows :] == 0).all()
    k = 1 if shape == "12b" else 2
    assert columns % k == rows % k == 0
    assert given["mm_token_type_ids"].sum() == columns * rows // k**2


def merged(patches: np.ndarray, positions: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """k x k plain patches as one, as `patches_merge` describes it: grouped by their positions over k."""
    side = int((patches.shape[1] // 3) ** 0.5)
    places = sorted({(y // k, x // k) for x, y in positions.tolist()})
    large = np.zeros((len(places), k * side, k * side, 3))
    for patch, (x, y) in zip(patches, positions.tolist(), strict=True):
        top, left = y % k * side, x % k * side
        block = patch.reshape(side, side, 3)
        large[places.index((y // k, x // k)), top : top + side, left : left + side] = block
    return large.reshape(len(places), -1), np.array([(x, y) for y, x in places])


@pytest.mark.parametrize("size", [(48, 32), (37, 61), (600, 5), (5, 600)])
def test_merged_patches_are_the_larger_plain_ones(size):
    plain = transformers.Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    small = plain(tiny_image(*size))
    real = (small["image_position_ids"][0] != -1).all(-1)
    patches, positions = merged(small["pixel_values"][0][real], small["image_position_ids"][0][real], 2)
    given = tiny_processor("12b")(images=tiny_image(*size))
    number = len(patches)
    assert np.allclose(given["pixel_values"][0][:number], patches, atol=1e-6)
    assert (given["image_position_ids"][0][:number] == positions).all()
    assert (given["image_position_ids"][0][number:] == -1).all()


@both
def test_a_frame_is_an_image(shape):
    frames, processor = tiny_video(3), tiny_processor(shape)
    given = processor(text="<|video|>", videos=frames, return_tensors="pt")
    images = processor(images=[Image.fromarray(frame) for frame in frames], return_tensors="pt")
    assert torch.equal(given["pixel_values_videos"], images["pixel_values"])
    assert torch.equal(given["video_position_ids"], images["image_position_ids"])
    assert (given["mm_token_type_ids"] == 2).sum() == (images["mm_token_type_ids"] == 1).sum()
    pictures = [Image.fromarray(frame) for frame in frames]
    for form in (pictures, [pictures], [frames], [[frames]], torch.tensor(frames), frames[None], [*frames]):
        assert_same(processor(text="<|video|>", videos=form, return_tensors="pt"), given)


def test_videos_of_different_lengths_and_sizes():
    given = tiny_processor("e2b")(
        text=["<|video|>", "<|video|> x"], videos=[tiny_video(2), tiny_video(1, 80, 10)], return_tensors="pt"
    )
    assert given["num_frames_per_video"].tolist() == [2, 1]
    assert given["pixel_values_videos"].shape == (3, 280, 48)
    sizes = ((given["video_position_ids"] != -1).all(-1).sum(-1) // 4).tolist()
    assert (given["mm_token_type_ids"] == 2).sum(-1).tolist() == [sum(sizes[:2]), sizes[2]]


def times(given: Any) -> list[str]:
    return re.findall(r"\d\d:\d\d", str(tiny_tokenizer().decode(given["input_ids"][0])))


def test_frames_are_chosen_evenly():
    processor, film = tiny_processor("12b"), tiny_video(40, 8, 8)

    def frames(**options: Any) -> Any:
        return processor(text="<|video|>", videos=film, video_metadata={"fps": 1.0}, **options)

    assert frames()["num_frames_per_video"] == [32]
    assert frames(do_sample_frames=False)["num_frames_per_video"] == [40]
    assert times(frames(num_frames=4)) == ["00:00", "00:10", "00:20", "00:30"]
    assert times(frames(fps=0.1)) == ["00:00", "00:10", "00:20", "00:30"]
    assert times(frames(videos_kwargs={"num_frames": 2, "max_soft_tokens": 140})) == ["00:00", "00:20"]
    every = processor(text="<|video|>", videos=film, do_sample_frames=False, return_tensors="pt")
    some = processor(text="<|video|>", videos=film, num_frames=4, return_tensors="pt")
    assert torch.equal(some["pixel_values_videos"], every["pixel_values_videos"][::10])


@both
def test_texts_are_padded_on_the_left(shape):
    processor = tiny_processor(shape)
    processor.tokenizer.padding_side = "right"
    given = processor(text=["a<|image|>", "abc"], images=[tiny_image()], return_tensors="pt")
    assert given["attention_mask"][1].tolist() == sorted(given["attention_mask"][1].tolist())
    assert given["attention_mask"][1, 0] == 0
    assert given["input_ids"].shape == given["mm_token_type_ids"].shape == given["attention_mask"].shape


def test_a_chat_with_everything_in_it():
    content = [
        {"type": "image", "image": tiny_image()},
        {"type": "video", "video": tiny_video(2)},
        {"type": "audio", "audio": tiny_sound(0.1)},
        {"type": "text", "text": "What?"},
    ]
    processor: Any = tiny_processor("e2b")
    given = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
    )
    text = "<bos><|turn>user\n<|image|><|video|><|audio|>What?<turn|>\n<|turn>model\n"
    same = processor(
        text=text,
        images=tiny_image(),
        videos=tiny_video(2),
        audio=tiny_sound(0.1),
        add_special_tokens=False,
        return_tensors="pt",
    )
    assert_same(given, same)
    assert given["mm_token_type_ids"].unique().tolist() == [0, 1, 2, 3]


@both
def test_what_is_saved_is_what_transformers_reads(shape, tmp_path):
    processor = tiny_processor(shape)
    processor.save_pretrained(tmp_path)
    settings, _ = transformers.ProcessorMixin.get_processor_dict(tmp_path)
    template = settings.pop("chat_template")
    assert settings == processor.to_dict() == json.loads(json.dumps(processor.settings))
    again = compose(settings, transformers.AutoTokenizer.from_pretrained(tmp_path), chat_template=template)
    assert again.chat_template == processor.chat_template
    call = CALLS["both"]
    assert_same(again(**call, return_tensors="pt"), processor(**call, return_tensors="pt"))


def test_published_defaults():
    for name, unified, side in (("Gemma4Processor", False, 16), ("Gemma4UnifiedProcessor", True, 48)):
        processor = compose({"processor_class": name, "feature_extractor": {}}, tiny_tokenizer())
        image, frames = processor.image_processor, processor.frames
        assert (image.patch_size, image.pooling_kernel_size) == (side, 1 if unified else 3)
        assert (image.max_soft_tokens, frames.max_soft_tokens) == (280, 70)
        assert processor.feature_extractor.feature_size == (640 if unified else 128)
        assert name in repr(processor)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"text": "a", "images": tiny_image()}, "the text has 0 <|image|> and 1 images are given"),
        (
            {"text": "<|image|>" * 2, "images": [tiny_image()]},
            "the text has 2 <|image|> and 1 images are given",
        ),
        ({"text": "<|image|>"}, "the text has 1 <|image|> and 0 images are given. Write one <|image|> where"),
        ({"text": "<|video|>"}, "the text has 1 <|video|> and 0 videos"),
        ({"text": "<|audio|>", "audio": [tiny_sound(), tiny_sound()]}, "1 <|audio|> and 2 audio are given"),
        (
            {"text": ["<|image|>", "<|image|>"], "images": [[tiny_image()] * 2, []]},
            "the rows of the text have [1, 1] <|image|>, and the lists of images [2, 0] images",
        ),
        ({"text": "a", "sharpen": True}, "the processor has no option `sharpen`"),
        ({}, "the processor is given nothing"),
        ({"text": []}, "the text is one string, or a list of them"),
        ({"text": "<|video|>", "videos": "film.mp4"}, "film.mp4: decoding a video takes transformers' own"),
        ({"text": "<|video|>", "videos": 3}, "a video is given as its frames"),
        (
            {"text": "<|video|>", "videos": [tiny_image(9, 9), tiny_image(9, 8)]},
            "the frames of a video have one size; these have (8, 9, 3), (9, 9, 3)",
        ),
        (
            {"text": "<|video|>", "videos": tiny_video(), "video_metadata": [{}, {}]},
            "1 videos are given, and 2 `video_metadata`",
        ),
        ({"text": "<|video|>", "videos": tiny_video(), "fps": 1}, "`video_metadata={'fps': ...}`"),
        ({"text": "<|audio|>", "audio": "a.wav"}, "sound is given as its samples"),
        ({"text": "<|audio|>", "audio": [np.zeros((2, 9))]}, "sound has one channel"),
        (
            {"text": "<|audio|>", "audio": tiny_sound(), "sampling_rate": 44100},
            "the sound has 44100 samples a second, and this model hears 16000",
        ),
        (
            {"text": "<|image|>", "images": tiny_image(), "truncation": True, "max_length": 9},
            "truncation cuts <|image|> tokens off",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a picture's name is its place in memory
)
def test_refusals(call, message):
    with pytest.raises(BadArgument, match=re.escape(message)):
        tiny_processor("e2b")(**call)


# -- what is given in another form ---------------------------------------------------------------------------

PIXELS = np.asarray(tiny_image())
FROM_ZERO_TO_ONE: dict[str, dict[str, Any]] = {
    "image": {"text": "<|image|>", "images": [PIXELS / 255]},
    "tensor": {"text": "<|image|>", "images": torch.tensor(PIXELS / 255).permute(2, 0, 1)},
    "second image": {"text": "<|image|><|image|>", "images": [tiny_image(), PIXELS / 255]},
    "half": {"text": "<|image|>", "images": [torch.tensor(PIXELS / 255, dtype=torch.bfloat16)]},
    "video": {"text": "<|video|>", "videos": [tiny_video() / 255]},
    "frames": {"text": "<|video|>", "videos": [[*(tiny_video() / 255)]]},
}


@pytest.mark.parametrize("name", FROM_ZERO_TO_ONE)
def test_pixels_from_zero_to_one_are_refused(name):
    with pytest.raises(BadArgument, match=r"has no value above .*pixels go from 0 to 255.*do_rescale=False"):
        tiny_processor("e2b")(**FROM_ZERO_TO_ONE[name])


def test_pixels_from_zero_to_one_that_are_said_to_be():
    processor = tiny_processor("e2b")
    for kind, pixels in (("image", PIXELS), ("video", tiny_video())):
        keyword = f"{kind}s"
        whole = processor(**{"text": f"<|{kind}|>", keyword: [pixels]}, return_tensors="pt")
        name = "pixel_values" if kind == "image" else "pixel_values_videos"
        share = (pixels / 255).astype(np.float32)
        for options in ({"do_rescale": False}, {f"{keyword}_kwargs": {"do_rescale": False}}):
            call = {"text": f"<|{kind}|>", keyword: [share], **options}
            given = processor(**call, return_tensors="pt")
            assert (given[name] - whole[name]).abs().max() < 0.01  # bytes are rounded when they are resized
    black = processor(text="<|image|>", images=[np.zeros((32, 48, 3))], return_tensors="pt")
    assert (black["pixel_values"] == 0).all()
    floats = processor(text="<|image|>", images=[PIXELS.astype(np.float32)], return_tensors="pt")
    assert floats["pixel_values"].max() > 0.5


SOUND_FORMS: dict[str, tuple[Any, str]] = {
    "int16": ((tiny_sound() * 32767).astype(np.int16), "these are int16. Give `samples / 32768`"),
    "int16 in a list": ([(tiny_sound() * 32767).astype(np.int16)], "these are int16"),
    "whole numbers": ([[3, -2] * 999], "these are int64"),
    "samples and rate": ((tiny_sound(), 16000), "alone, at the model's rate, and not as a pair of them"),
    "samples and rate in a list": ([(tiny_sound(), 16000)], "not as a pair of them and their rate"),
    "rate and samples": ([(16000, tiny_sound())], "not as a pair of them and their rate"),
    "dict": ({"array": tiny_sound(), "sampling_rate": 16000}, "not as a dict that holds them and their rate"),
    "dict in a list": ([{"array": tiny_sound(), "sampling_rate": 16000}], "not as a dict"),
    "none": ([None], "a sound is an array of samples, not NoneType"),
    "file": (["a.wav"], "decode the file first"),
}


@pytest.mark.parametrize("name", SOUND_FORMS)
def test_sound_in_another_form_is_refused(name):
    sound, message = SOUND_FORMS[name]
    with pytest.raises(BadArgument, match=re.escape(message)):
        tiny_processor("e2b")(text="<|audio|>", audio=sound)


@pytest.mark.parametrize("number", [1, 3], ids=str)
def test_as_many_lists_as_texts(number):
    text, lists = ["<|image|>", "a"], [[tiny_image()], [], []][:number]
    with pytest.raises(BadArgument, match=rf"{number} lists of images are given, and 2 texts: give a list"):
        tiny_processor("e2b")(text=text, images=lists)
    with pytest.raises(BadArgument, match="2 lists of images are given, and 1 texts"):
        tiny_processor("e2b")(text="<|image|><|image|>", images=[[tiny_image()], [tiny_image()]])


def test_lists_beside_what_is_none():
    processor, both_texts = tiny_processor("e2b"), ["<|image|>", "<|image|>"]
    with pytest.raises(BadArgument, match="some images are given in lists and some are not"):
        processor(text=both_texts, images=[tiny_image(), [tiny_image()]])
    with pytest.raises(BadArgument, match="an image is None"):
        processor(text=both_texts, images=[[tiny_image()], [None]])
    with pytest.raises(BadArgument, match="a video is given as its frames"):
        processor(text="<|video|>", videos=[None])


EMPTY: dict[str, Any] = {"nothing": [], "an empty list": [[]], "empty lists": [[], []], "a tuple": ()}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("keyword", ["images", "videos", "audio"])
def test_empty_lists_are_nothing(keyword, name):
    processor, call = tiny_processor("e2b"), {keyword: EMPTY[name]}
    text = ["a", "abc"]
    assert_same(processor(text=text, **call, return_tensors="pt"), processor(text=text, return_tensors="pt"))
    token = f"<|{keyword.removesuffix('s')}|>"
    with pytest.raises(BadArgument, match=re.escape(f"the text has 1 {token} and 0 {keyword} are given")):
        processor(text=token, **call)
    with pytest.raises(BadArgument, match="the processor is given nothing"):
        processor(**call)


def test_sounds_and_videos_in_a_list_for_each_text():
    processor, sounds, film = tiny_processor("e2b"), [tiny_sound(0.1), tiny_sound(0.3)], tiny_video(2)
    text = ["<|audio|>", "and <|audio|>"]
    flat = processor(text=text, audio=sounds, return_tensors="pt")
    assert_same(processor(text=text, audio=[[sound] for sound in sounds], return_tensors="pt"), flat)
    alone = processor(audio=[sounds, []], return_tensors="pt")
    assert alone["mm_token_type_ids"].any(-1).tolist() == [True, False]
    assert torch.equal(alone["input_features"], flat["input_features"])
    assert_same(
        processor(text="<|audio|>", audio=sounds[0].tolist(), return_tensors="pt"),
        processor(text="<|audio|>", audio=sounds[0], return_tensors="pt"),
    )
    flat = processor(text=["<|video|>", "a"], videos=[film], return_tensors="pt")
    for lists in ([[film], []], [[[Image.fromarray(frame) for frame in film]], []]):
        assert_same(processor(text=["<|video|>", "a"], videos=lists, return_tensors="pt"), flat)
    given = {"audio": sounds[:1], "videos": [film]}
    for keyword, items in given.items():
        call: dict[str, Any] = {"text": ["a", f"<|{keyword.removesuffix('s')}|>"], keyword: [items, []]}
        with pytest.raises(BadArgument, match=r"the rows of the text have \[0, 1\]"):
            processor(**call)


def test_an_image_by_its_path(tmp_path):
    processor, path = tiny_processor("e2b"), tmp_path / "picture.png"
    tiny_image().save(path)
    given = processor(text="<|image|>", images=tiny_image(), return_tensors="pt")
    for form in (path, str(path), [path], [[path]]):
        assert_same(processor(text="<|image|>", images=form, return_tensors="pt"), given)


def test_a_processor_without_a_part_for_sound():
    settings = tiny_processor("e2b").to_dict()
    del settings["feature_extractor"]
    with pytest.raises(BadArgument, match="takes no sound"):
        compose(settings, tiny_tokenizer())(text="<|audio|>", audio=tiny_sound())


def without(*tokens: str) -> Any:
    """The tiny tokenizer, in which these tokens are in the vocabulary and not among the special ones."""
    plain: Any = tiny_tokenizer()
    written = json.loads(plain.backend_tokenizer.to_str())
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] not in tokens]
    names = ("boi", "image", "eoi", "boa", "audio", "eoa")
    named = {f"{name}_token": getattr(plain, f"{name}_token") for name in names}
    extra = {name: token for name, token in named.items() if token not in tokens}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)),
        extra_special_tokens=extra,
        pad_token="<pad>",
        bos_token="<bos>",
    )


def test_a_video_token_that_is_not_registered():
    tokenizer = without("<|video|>")
    assert len(tokenizer.encode("<|video|>", add_special_tokens=False)) > 1
    given = compose(tiny_processor("e2b").to_dict(), tokenizer)(text="<|video|>", videos=tiny_video(1))
    assert given["input_ids"] == tiny_processor("e2b")(text="<|video|>", videos=tiny_video(1))["input_ids"]


def test_a_tokenizer_without_a_token_for_sound():
    tokenizer = without("<|audio|>")
    with pytest.raises(BadArgument, match="the tokenizer has no audio token, so no audio can be placed"):
        compose(tiny_processor("e2b").to_dict(), tokenizer)(text="a", audio=tiny_sound())


def test_what_is_passed_along_by_chats_and_left_out_types():
    given = tiny_processor("e2b")(text="a", load_audio_from_video=False, return_mm_token_type_ids=False)
    assert {*given} == {"input_ids", "attention_mask"}
