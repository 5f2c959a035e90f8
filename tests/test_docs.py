"""The documents: every snippet runs and shows what comes out, and what is generated is current."""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import huggingface_hub.constants
import pytest
import torch
import yaml
from transformers.utils import logging as transformers_logging
from typer.main import get_command

from gemloupe import errors, families
from gemloupe.cli import app
from gemloupe.layouts import LAYOUTS
from gemloupe.support import HOSTS
from gemloupe.testing import save_tiny, tiny, tiny_image, tiny_sound, tiny_video
from tests.documents import Mismatch, fences, run, same
from tests.media.given import VIDEO

ROOT = Path(__file__).parent.parent
# Written by `make bench`, which checks what it writes; it holds no code.
GENERATED_BY_BENCHMARKS: Final = "benchmarks.md"
PAGES: Final = {
    path.relative_to(ROOT).as_posix(): path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if path.name != GENERATED_BY_BENCHMARKS
}
TEXTS: Final = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
# What a fence may hold. `python` is run, `text` is what it shows, `console` is checked below.
LANGUAGES: Final = {"python", "text", "console", "bibtex"}


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()


# ---- every snippet runs ------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub cache in which each published checkpoint is the tiny wrapper of its shape, and no network.

    So that a page says `google/gemma-4-E2B` and its code runs as it stands, loader and all.
    """

    def fill(text: str) -> None:
        for name in sorted(set(re.findall(r"google/gemma-4-(?:E2B|E4B|26B-A4B|31B|12B)(?:-it)?", text))):
            shape = generate.CHECKPOINTS[name.removeprefix("google/gemma-4-").removesuffix("-it")]
            place = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
            save_tiny(place / "snapshots" / commit, shape, wrapper=True)
            (place / "refs").mkdir()
            (place / "refs" / "main").write_text(commit)

    commit = "0" * 40
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    yield fill
    if bars:
        transformers_logging.enable_progress_bar()


@pytest.mark.parametrize("page", [name for name, text in TEXTS.items() if "```python" in text])
def test_every_snippet_runs_and_shows_what_comes_out(page, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(families, "_MODULES", dict(families._MODULES))
    monkeypatch.chdir(tmp_path)
    hub(TEXTS[page])
    # What is shown of video runs where the installed transformers takes it.
    without = None if VIDEO else r"videos=|video_|film"
    name = PAGES[page].stem.lower().replace("-", "_")
    assert run(TEXTS[page], name, tmp_path, without=without) > 0


def test_the_pages_have_snippets():
    with_code = {name for name, text in TEXTS.items() if "```python" in text}
    assert {"README.md", "docs/index.md", "docs/tour.md", "docs/recipes.md", "docs/errors.md"} <= with_code
    assert "docs/adding-a-family.md" in with_code


@pytest.mark.parametrize("page", TEXTS)
def test_a_fence_says_what_it_holds(page):
    assert {fence.language for fence in fences(TEXTS[page])} <= LANGUAGES


@pytest.mark.parametrize("page", TEXTS)
def test_no_snippet_hides_in_another_spelling(page):
    # A tilde fence, or one in capitals, would be shown as code and not be run.
    assert not re.search(r"^\s*~~~|```\s*(Python|py|pycon|python3)\b", TEXTS[page], re.MULTILINE)


# ---- the runner itself: a check that cannot fail is worse than none ----------------------------------------

RIGHT: Final = """
```python
print("one")
1 + 1  # -> 2
```

```text
one
```

```python
[][0]
```

```text
IndexError: list index out of range
```
"""


def test_a_right_page_is_accepted(tmp_path):
    assert run(RIGHT, "right", tmp_path) == 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# -> 2", "# -> 3"),
        ("1 + 1  # -> 2", "x = 1 + 1  # -> 2"),
        ('print("one")', 'print("two")'),
        ('print("one")\n', ""),
        ("```text\none\n```\n", ""),
        ("```text\none\n```\n", "Shown.\n\n```text\none\n```\n"),
        ("[][0]", "[0][0]"),
        ("IndexError", "KeyError"),
        ("```text\nIndexError: list index out of range\n```\n", ""),
        ("[][0]", "import warnings\n\nwarnings.warn('careful')"),
    ],
    ids=[
        "another value",
        "not an expression",
        "another output",
        "no output",
        "unshown output",
        "text between",
        "no error",
        "another error",
        "unshown error",
        "a warning",
    ],
)
def test_a_page_that_shows_something_else_is_refused(tmp_path, old, new):
    assert old in RIGHT
    with pytest.raises(Mismatch, match="wrong"):
        run(RIGHT.replace(old, new), "wrong", tmp_path)


def test_numbers_agree_to_the_last_digit_shown():
    assert same("x 0.12 1.5e-03 7", "x 0.1249 1.51e-3 7")
    assert not same("0.12", "0.14")
    assert not same("7", "8")
    assert not same("0.12 a", "0.12 b")


def test_a_line_of_code_keeps_its_number(tmp_path):
    run(
        "\n\n```python\nimport sys\n\nline = sys._getframe().f_lineno\nline  # -> 6\n```\n",
        "numbers",
        tmp_path,
    )


# ---- what is generated -------------------------------------------------------------------------------------


def test_what_is_generated_is_current():
    for path, text in generate.pages().items():
        committed = path.read_text(encoding="utf-8")
        assert committed == text, f"{path.name} differs from the package: run `python docs/generate.py`"


def test_the_vocabulary_has_every_value():
    page = TEXTS["docs/vocabulary.md"]
    anchors = re.findall(r"\]\(#(\w+)\)", page.partition("## Order")[0])
    for place, name, value in generate.values():
        title = generate.title(place, name)
        assert page.count(f"\n### {title}\n") == 1
        assert f"\n### {title}\n\n`{value.layout}`" in page
        assert anchors.count(generate.anchor(place, name)) == 1
    assert len(anchors) == len(generate.values()), "two values share an anchor, or one has no link"


def test_every_axis_is_explained():
    assert {axis for layout in LAYOUTS.values() for axis in layout.axes} <= generate.AXES.keys()


def test_every_place_has_a_title():
    assert generate.PLACES.keys() == HOSTS.keys()


VISION: Final = ("images", "videos")
FED_BY: Final = {"vision": VISION, "projector": VISION, "audio": ("audio",), "audio_projector": ("audio",)}
"""What any of which makes a part of a wrapper run; the masks of the prompt are there in every call."""
ONE_KIND: Final = {"vision.image_features": ("images",), "vision.video_features": ("videos",)}


def is_computed(path: str, given: dict[str, Any]) -> bool:
    feeds = ONE_KIND.get(path, FED_BY.get(path.partition(".")[0]))
    return feeds is None or path.endswith("_token_mask") or any(feed in given for feed in feeds)


def paths_in_order(model: Any, given: dict[str, Any]) -> list[list[str]]:
    """The lines of the page's order for one block of each stack, as far as a call computes them."""
    lines = []
    for paths in generate.moments():
        runs = (path.replace("[i]", "[1]") for path in paths if is_computed(path, given))
        lines.append([path for path in runs if model.has(path)])
    return [line for line in lines if line]


def read(model: Any, path: str) -> Any:
    for part in path.split("."):
        name, _, index = part.partition("[")
        model = getattr(model, name)
        model = model[int(index[:-1])] if index else model
    return model


TEXT: Final = ("The capital", {})
IMAGE: Final = ("<|image|> The capital", {"images": [tiny_image()]})
CALLS: Final = {
    "e2b": ("e2b", False, *TEXT),
    "26b-a4b": ("26b-a4b", False, *TEXT),
    "e2b, image and sound": (
        "e2b",
        True,
        "<|image|> and <|audio|>",
        {"images": [tiny_image()], "audio": [tiny_sound()]},
    ),
    "e2b, video": ("e2b", True, "<|video|>", {"videos": [tiny_video(2)]}),
    "26b-a4b, image": ("26b-a4b", True, *IMAGE),
    "12b, image and sound": (
        "12b",
        True,
        "<|image|> and <|audio|>",
        {"images": [tiny_image()], "audio": [tiny_sound(0.01)]},
    ),
}
"""The tiny model, whether it is the wrapper, and what it is given."""

each_call = pytest.mark.parametrize("call", [call for call in CALLS if VIDEO or "video" not in call])


@each_call
def test_the_order_on_the_page_is_the_order_of_the_forward(call):
    shape, wrapper, text, given = CALLS[call]
    model = tiny(shape, wrapper=wrapper)
    lines = paths_in_order(model, given)
    assert {path for line in lines for path in line} >= {"input_ids", "layers[1].layer_output", "logits"}
    with torch.no_grad(), model.trace(text, **given):
        for line in lines:
            for path in line:
                read(model, path)
    with torch.no_grad(), model.trace(text, **given):
        for line in lines:
            for path in reversed(line):
                read(model, path)


@each_call
def test_the_order_on_the_page_cannot_be_turned_round(call):
    shape, wrapper, text, given = CALLS[call]
    model = tiny(shape, wrapper=wrapper)
    for line, later in itertools.pairwise(paths_in_order(model, given)):
        with pytest.raises(errors.OutOfOrder), torch.no_grad():
            with model.trace(text, **given):
                read(model, later[0])
                read(model, line[-1])


def test_the_order_on_the_page_has_every_value_once():
    paths = [path for paths in generate.moments() for path in paths]
    assert sorted(paths) == sorted(generate.path_of(place, name) for place, name, _ in generate.values())
    shown = re.findall(r"`([^`]+)`", re.split("## Order|The tower runs", TEXTS["docs/vocabulary.md"])[1])
    stacks = ["layers[i]", "vision.layers[i]", "audio.layers[i]"]
    assert [name for name in shown if name in stacks] == ["vision.layers[i]", "audio.layers[i]", "layers[i]"]
    assert len([name for name in shown if name not in stacks]) - len(
        ("OutOfOrder", "collect", "record")
    ) == len(paths)


# ---- what every page must have -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "GemloupeError"])
def test_every_error_has_symptom_cause_and_fix(name):
    sections = re.split(r"^## ", TEXTS["docs/errors.md"], flags=re.MULTILINE)
    [section] = [section for section in sections if section.startswith(f"{name}\n")]
    for label in ("Symptom", "Cause", "Fix"):
        assert section.count(f"**{label}.**") == 1
    if name != "UnsupportedRelease":  # needs another transformers
        shown = [fence for fence in fences(section) if fence.language == "text"]
        assert any(fence.text.startswith(f"gemloupe.errors.{name}: ") for fence in shown)


def test_the_site_lists_every_page_once():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = [page for entry in config["nav"] for page in entry.values()]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def commands() -> list[tuple[str, str]]:
    blocks = [
        (name, fence) for name, text in TEXTS.items() for fence in fences(text) if fence.language == "console"
    ]
    return [
        (name, line.removeprefix("$ "))
        for name, fence in blocks
        for line in fence.text.split("\n")
        if line.startswith("$ ")
    ]


def test_commands_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    group: Any = get_command(app)
    known = group.commands
    assert commands()
    for page, command in commands():
        words = command.split()
        if words[0] == "make":
            assert words[1] in targets, f"{page}: {command}"
        elif words[:3] == ["python", "-m", "gemloupe"]:
            assert words[3] in known, f"{page}: {command}"
        else:
            assert words[:4] == ["python", "-m", "pip", "install"], f"{page}: {command}"


def test_links_of_the_readme_lead_somewhere():
    # mkdocs checks those of docs/.
    for link in re.findall(r"\]\(([^)#]+)", TEXTS["README.md"]):
        assert (ROOT / link).exists(), link
