"""The command line: what it prints where, its exit statuses, and what it does not import."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled
from huggingface_hub.utils import logging as hub_logging
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner

import gemloupe
from gemloupe import card, targets, tour
from gemloupe.cli import app
from gemloupe.plan import plan
from gemloupe.testing import SHAPES, save_tiny, tiny, tiny_config, tiny_module, tiny_tokenizer
from tests.test_plan import PUBLISHED

WIDE: Final = {"COLUMNS": "200"}


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env=WIDE)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m gemloupe`, in a process of its own that cannot reach the hub."""
    return python("-m", "gemloupe", *arguments, **environment)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", **environment}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, encoding="utf-8", env=settings, check=False
    )


# ---- in a process of its own ------------------------------------------------------------------------------


def test_the_tour_in_a_process():
    result = run("tour")
    assert result.stderr == ""
    assert result.returncode == 0
    assert "A tiny e2b: 10 blocks, hidden 40, random weights" in result.stdout
    assert "├── layers[0] for blocks 0-4" in result.stdout
    assert "mid_stream        [batch seq hidden]  The stream after the attention's add." in result.stdout
    assert "What held: 11 of 11" in result.stdout


def test_a_terminal_that_knows_ascii_alone():
    result = run("tour", "--shape", "12b", PYTHONIOENCODING="ascii")
    assert (result.stderr, result.returncode) == ("", 0)
    assert result.stdout.isascii()


def test_the_card_in_a_process(tmp_path: Path):
    PUBLISHED["12B"].text_config().save_pretrained(tmp_path)
    result = run("inspect", str(tmp_path))
    assert result.stderr == ""
    assert result.returncode == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "layers 48 (40 sliding, 8 full)" in lines
    assert "hidden size 3840" in lines
    assert "parameters 11.91 B (11,907,350,272; text model, tied head counted once)" in lines
    assert "5, 11, 17, 23, 29, 35, 41, 47 full 16 1 512 15360 own, values from k_proj" in lines


def test_json_in_a_process():
    result = run("inspect", "tiny:e2b:wrapper", "--json")
    assert (result.stderr, result.returncode) == ("", 0)
    assert (
        json.loads(result.stdout)["num_parameters"] == plan(tiny_config("e2b", wrapper=True)).num_parameters
    )


def test_a_repository_that_is_not_there():
    result = run("inspect", "google/no-such-model")
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(
        r"gemloupe: google/no-such-model is no directory or reachable repo id .*\n", result.stderr
    )


def test_the_version_in_a_process():
    result = run("--version")
    assert (result.stdout, result.stderr, result.returncode) == (f"{gemloupe.__version__}\n", "", 0)


HEAVY: Final = (
    "[name for name in ('torch', 'transformers', 'nnsight', 'huggingface_hub') if name in sys.modules]"
)


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], []),
        (["--version"], []),
        (["tour", "--help"], []),
        (["inspect", "--help"], []),
        (["verify", "--help"], []),
        (["harvest", "--help"], []),
        (["inspect", "tiny:e2b"], ["torch", "transformers", "nnsight", "huggingface_hub"]),
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str], heavy: list[str]):
    code = (
        f"import sys\nfrom gemloupe.cli import app\napp({arguments}, standalone_mode=False)\nprint({HEAVY})"
    )
    result = python("-c", code)
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1] == str(heavy)


# ---- in this process --------------------------------------------------------------------------------------


def test_help_names_the_commands_and_the_shapes():
    text = invoke("--help").stdout
    assert re.findall(r"^│ (\w+) ", text.partition("Commands")[2], re.MULTILINE) == [
        "tour",
        "inspect",
        "verify",
        "harvest",
    ]
    assert "--version" in text
    shapes = re.search(r"shape: (.+?)\.", invoke("tour", "--help").stdout)
    assert shapes
    assert re.split(r", | or ", shapes[1]) == list(SHAPES)
    assert "tiny:SHAPE" in invoke("inspect", "--help").stdout


def test_the_version():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"{gemloupe.__version__}\n")


def test_the_shape_is_the_tours(monkeypatch: pytest.MonkeyPatch):
    taken = []
    monkeypatch.setattr(
        tour, "take_tour", lambda shape, console: taken.append((shape, console.width)) or True
    )
    assert [invoke("tour", "--shape", "31b").exit_code, invoke("tour").exit_code] == [0, 0]
    assert taken == [("31b", 200), ("e2b", 200)]


def test_a_check_that_does_not_hold_is_exit_status_1(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tour, "take_tour", lambda *_: False)
    result = invoke("tour")
    assert (result.exit_code, result.stderr) == (1, "")


@pytest.mark.parametrize("target", [*(f"tiny:{shape}" for shape in SHAPES), "tiny:12b:wrapper"])
def test_a_card_and_its_json(target: str):
    text, data = invoke("inspect", target), invoke("inspect", target, "--json")
    assert (text.exit_code, data.exit_code) == (0, 0)
    assert text.stderr == data.stderr == ""
    assert text.stdout.splitlines()[0].strip() == target
    assert json.loads(data.stdout) == json.loads(card.read_card(target).to_json())
    assert all(word in text.stdout for word in ("Blocks", "Values", "Traps", "[i]"))


@pytest.fixture
def wrong_targets(tmp_path: Path) -> dict[str, str]:
    for name, config in {
        "broken": "{",
        "untyped": "{}",
        "mistyped": '{"model_type": "gemma4_text", "hidden_size": "wide"}',
        "unconsidered": '{"model_type": "gemma4_text", "new_field": 1}',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    LlamaConfig().save_pretrained(tmp_path / "llama")
    (tmp_path / "empty").mkdir()
    return {name: str(tmp_path / name) for name in (*(path.name for path in tmp_path.iterdir()), "missing")}


WRONG: Final = {
    "empty": "has no config.json",
    "missing": "is no directory with a config",
    "broken": "not a valid JSON file",
    "untyped": "Should have a `model_type` key",
    "mistyped": "expected int, got str",
    "unconsidered": "config.new_field=1: Gemloupe has not considered this field",
    "llama": "model type 'llama' is not supported; known are gemma4_text, gemma4_unified_text",
}


@pytest.mark.parametrize("json_too", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_target_is_one_line_and_exit_status_2(
    wrong_targets: dict[str, str], name: str, json_too: bool
):
    result = invoke("inspect", wrong_targets[name], *(["--json"] if json_too else []))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(r"gemloupe: .+\n", result.stderr)
    assert WRONG[name] in result.stderr


@pytest.mark.parametrize(
    "arguments", [("tour", "--shape", "e3b"), ("inspect", "tiny:e3b"), ("verify", "tiny:e3b")]
)
def test_an_unknown_shape_names_the_known(arguments: tuple[str, ...]):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(r"gemloupe: there is no .*e3b.*\n", result.stderr)
    assert all(shape in result.stderr for shape in SHAPES)


@pytest.mark.parametrize("arguments", [(), ("inspect",), ("sing",), ("tour", "--loud"), ("verify",)])
def test_a_wrong_call_is_exit_status_2(arguments: tuple[str, ...]):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


# ---- verify -----------------------------------------------------------------------------------------------


def test_a_verification_in_a_process(tmp_path: Path):
    page = tmp_path / "page.html"
    result = run("verify", "tiny:e2b", "--html", str(page))
    assert (result.stderr, result.returncode) == ("", 0)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "tiny:e2b: 10 blocks, float32"
    assert any(re.fullmatch(r"self_attn\.own_keys 5 .+ yes", line) for line in lines)
    assert lines[-1] == "Every value is what its definition says: 597 of 597 rows hold."
    assert "<title>tiny:e2b: verify</title>" in page.read_text(encoding="utf-8")


def test_a_verification_of_a_directory_as_json(tmp_path: Path):
    save_tiny(tmp_path, "26b-a4b", dtype=torch.bfloat16)
    result = invoke("verify", str(tmp_path), "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    assert (data["model"], data["held"], data["precision"]) == (str(tmp_path), True, "bfloat16")


@pytest.mark.parametrize("wrapper", [False, True], ids=["text", "wrapper"])
def test_a_checkpoint_without_a_tokenizer_can_be_verified(tmp_path: Path, wrapper: bool):
    tiny_module("12b", wrapper=wrapper).save_pretrained(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert not [file for file in tmp_path.iterdir() if "token" in file.name]
    result = invoke("verify", str(tmp_path), "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["held"]


def test_help_names_every_exit_status():
    words = " ".join(invoke("verify", "--help").stdout.replace("│", "").split())
    assert "Exit status 0: every value holds. 1: some value is not what it should be. 2: nothing can" in words
    assert "Exit status 2 if there is no config" in " ".join(invoke("inspect", "--help").stdout.split())


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_a_value_that_does_not_hold_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...]
):
    def faulty(_target: str) -> Any:
        model: Any = tiny("12b")
        model._module.model.layers[3].self_attn.scaling = 1.01
        return model

    monkeypatch.setattr(targets, "load", faulty)
    page = tmp_path / "page.html"
    result = invoke("verify", "tiny:12b", "--html", str(page), *arguments)
    assert (result.exit_code, result.stderr) == (1, "")
    first = "layers[3].self_attn.attention_scores"
    assert first in result.stdout
    assert f"<li>{first}, from" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["empty", "missing", "broken", "unconsidered", "llama"])
def test_a_target_that_cannot_be_verified_is_one_line_and_exit_status_2(
    wrong_targets: dict[str, str], name: str
):
    result = invoke("verify", wrong_targets[name])
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(r"gemloupe: .+\n", result.stderr)


def test_a_weight_that_is_no_number_is_exit_status_2(tmp_path: Path):
    module: Any = tiny_module("12b")
    with torch.no_grad():
        module.model.layers[2].mlp.up_proj.weight[0, 0] = torch.nan
    module.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    result = invoke("verify", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "model.layers.2.mlp.up_proj.weight holds NaN" in result.stderr


def test_a_page_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing" / "page.html"):
        result = invoke("verify", "tiny:12b", "--html", str(path))
        assert (result.exit_code, result.stdout) == (2, "")
        assert "is no file that can be written" in result.stderr


def test_a_mistake_of_ours_is_not_called_the_users(monkeypatch: pytest.MonkeyPatch):
    def broken(_target: str):
        raise KeyError("a mistake")

    monkeypatch.setattr(card, "read_card", broken)
    result = invoke("inspect", "tiny:e2b")
    assert result.exit_code == 1
    assert isinstance(result.exception, KeyError)


@pytest.fixture
def loud() -> Iterator[tuple[Any, ...]]:
    """The libraries below say all they have to say; what they are set to, then and in the end."""
    before = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    transformers_logging.set_verbosity_info()
    hub_logging.set_verbosity_debug()
    transformers_logging.enable_progress_bar()
    yield loudness()
    transformers_logging.set_verbosity(before[0])
    hub_logging.set_verbosity(before[1])


def loudness() -> tuple[Any, ...]:
    levels = transformers_logging.get_verbosity(), hub_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    return *levels, *bars, list(warnings.filters)


def test_the_libraries_below_are_quiet_and_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch, loud: tuple[Any, ...]
):
    seen = []

    def noisy(*_: Any) -> bool:
        warnings.warn("a warning", stacklevel=1)
        seen.append(loudness()[:4])
        return True

    monkeypatch.setattr(tour, "take_tour", noisy)
    result = invoke("tour")
    assert (result.exit_code, result.output) == (0, "")
    assert seen == [(logging.ERROR, logging.ERROR, False, False)]
    assert loud == (logging.INFO, logging.DEBUG, True, True, loud[-1]) == loudness()


def test_a_page_that_cannot_be_written_leaves_the_report_and_says_so():
    result = invoke("verify", "tiny:12b", "--html", "/dev/full")
    assert result.exit_code == 2
    assert "Every value is what its definition says" in result.output
    assert "/dev/full cannot be written" in result.output


def test_weights_that_cannot_be_read_are_told_in_one_line(tmp_path):
    save_tiny(tmp_path, "12b")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    result = invoke("verify", str(tmp_path))
    assert result.exit_code == 2
    assert "cannot be read" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("renamed", [False, True], ids=["one", "all"])
def test_a_checkpoint_without_some_weights_is_refused_by_name(tmp_path, renamed):
    save_tiny(tmp_path, "12b")
    place = tmp_path / "model.safetensors"
    weights = load_file(place)
    if renamed:
        weights = {f"other.{name}": tensor for name, tensor in weights.items()}
    else:
        del weights["model.layers.2.self_attn.q_proj.weight"]
    save_file(weights, place, metadata={"format": "pt"})
    level, handlers = transformers_logging.get_verbosity(), [*logging.getLogger("transformers").handlers]
    result = invoke("verify", str(tmp_path))
    assert result.exit_code == 2
    assert "weight" in result.output
    assert "nothing can be said" in result.output
    assert ("layers.2.self_attn.q_proj.weight:" in result.output) != renamed
    assert transformers_logging.get_verbosity() == level
    assert {*logging.getLogger("transformers").handlers} == {*handlers}
