"""`python -m gemloupe harvest`: what it writes, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gemloupe import Store, harvest, targets
from gemloupe.cli import app
from gemloupe.errors import HarvestStopped
from gemloupe.harvesting import run
from gemloupe.testing import save_tiny, tiny
from tests.harvesting.data import OUTPUT

TEXTS = ["opal", "a longer jade", "agate"]


@pytest.fixture
def call(tmp_path: Path) -> list[str]:
    (tmp_path / "in.txt").write_text("\n".join(TEXTS) + "\n")
    out = str(tmp_path / "s")
    return ["harvest", "tiny:e2b", "--values", OUTPUT, "--input", str(tmp_path / "in.txt"), "--out", out]


def invoke(arguments: list[str]) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_the_command_writes_what_the_function_does(call: list[str], tmp_path: Path):
    more = [
        "--values",
        "layers[1:3].mlp.mlp_output",
        "--positions",
        "content",
        "--sample",
        "3",
        "--seed",
        "4",
    ]
    more += ["--dtype", "bfloat16", "--truncate", "9", "--robust", "--shard-mib", "1"]
    more += ["--tokens-per-batch", "20"]
    result = invoke([*call, *more])
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"Store('{tmp_path / 's'}': 9 rows of 3 values" in result.stdout
    wanted = harvest(
        tiny("e2b"),
        TEXTS,
        [OUTPUT, "layers[1:3].mlp.mlp_output"],
        tmp_path / "wanted",
        positions="content",
        sample=3,
        seed=4,
        dtype=torch.bfloat16,
        truncate=9,
        robust=True,
        shard_bytes=2**20,
        tokens_per_batch=20,
    )
    store = Store(tmp_path / "s")
    assert store.index == wanted.index
    assert torch.equal(store[OUTPUT][:], wanted[OUTPUT][:])
    # The same command once more has nothing to do.
    assert invoke([*call, *more]).exit_code == 0


def test_a_column_of_jsonl(call: list[str], tmp_path: Path):
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps({"body": text}) for text in TEXTS))
    call[call.index("--input") + 1] = str(file)
    assert f"line 1 of {file} has no 'text'" in invoke(call).stderr
    assert invoke([*call, "--column", "body"]).exit_code == 0
    assert len(Store(tmp_path / "s")) == sum(len(text) + 1 for text in TEXTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--dtype", "bf16"], "--dtype is one of float32, bfloat16, float16, float64, not 'bf16'"),
        (["--dtype", "int8"], "--dtype is one of float32, bfloat16, float16, float64, not 'int8'"),
        (["--model-dtype", "int8"], "--model-dtype is one of float32"),
        (["--revision", "main"], "tiny:e2b is made in memory, on the CPU, and takes no revision"),
        (["--input", "nowhere.txt"], "there is no file nowhere.txt"),
        (["--positions", "first"], "--positions is one of all, last, content, not 'first'.\n"),
        (["--shard-mib", "0"], "--shard-mib is a number of MiB, 1 or more, not 0"),
        (["--device-map", "cpu"], "tiny:e2b is made in memory, on the CPU, and takes no device_map"),
        (["--values", "layers[3].layer_outptu"], "layer_output"),
        (["--values", "layers[9].self_attn.own_keys"], "borrows"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_what_is_wrong_is_told_in_one_line(change: list[str], message: str, call: list[str], tmp_path: Path):
    result = invoke([*call, *change])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("gemloupe: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_a_file_that_is_no_text_is_told_in_one_line(call: list[str], tmp_path: Path):
    (tmp_path / "in.txt").write_bytes(b"opal\ncaf\xe9\n")
    result = invoke(call)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"gemloupe: harvest: line 2 of {tmp_path / 'in.txt'} is not UTF-8 text")
    assert result.stderr.count("\n") == 1


def test_a_harvest_that_stops_midway_is_exit_status_1(call: list[str], monkeypatch: pytest.MonkeyPatch):
    def stop(*_: Any, **__: Any) -> None:
        raise HarvestStopped("harvest stopped: the disk is full")

    monkeypatch.setattr(run, "harvest", stop)
    result = invoke(call)
    assert (result.exit_code, result.stderr) == (1, "gemloupe: harvest stopped: the disk is full\n")


def test_a_harvest_that_is_stopped_by_hand_says_that_it_goes_on(
    call: list[str], monkeypatch: pytest.MonkeyPatch
):
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "harvest", stop)
    result = invoke(call)
    assert result.exit_code == 130
    assert (
        result.stderr
        == "gemloupe: harvest stopped by hand. Complete shards stay; the same command goes on.\n"
    )


def test_a_checkpoint_computes_in_the_dtype_and_is_of_the_revision_asked_for(call: list[str], tmp_path: Path):
    save_tiny(tmp_path / "model", "e2b")
    call[1] = str(tmp_path / "model")
    assert invoke([*call, "--model-dtype", "bfloat16"]).exit_code == 0
    store = Store(tmp_path / "s")
    assert store.index.model["dtype"] == "bfloat16"
    assert store[OUTPUT].dtype == torch.bfloat16
    asked: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "load", lambda _target, **options: asked.append(options) or tiny("e2b"))
        call[-1] = str(tmp_path / "other")
        assert invoke([*call, "--revision", "v2"]).exit_code == 0
    assert asked == [{"text": True, "revision": "v2"}]


@pytest.mark.parametrize(
    ("more", "wanted"), [([], {"device_map": "cuda:3"}), (["--device-map", "auto"], {"device_map": "auto"})]
)
def test_under_torchrun_each_process_has_a_gpu_of_its_own(
    more: list[str], wanted: Any, call: list[str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[Any] = []

    def load(target: str, *, text: bool, **options: Any) -> Any:
        assert text  # the sequences are tokenized
        asked.append(options)
        return tiny("e2b")

    call[1] = "some/checkpoint"
    monkeypatch.setattr(targets, "load", load)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert invoke([*call, *more]).exit_code == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert invoke([*call, *more]).exit_code == 0
    assert asked == [{} if not more else wanted, wanted]


def test_under_torchrun_a_tiny_model_stays_on_the_cpu(
    call: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert invoke(call).exit_code == 0
    assert Store(tmp_path / "s").complete


def test_a_checkpoint_is_loaded_where_it_is_told_and_none_of_it_is_made_up(call: list[str], tmp_path: Path):
    save_tiny(tmp_path / "model", "e2b")
    call[1] = str(tmp_path / "model")
    assert invoke([*call, "--device-map", "auto"]).exit_code == 0
    assert Store(tmp_path / "s").index.model["name"] == str(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights["model.layers.2.self_attn.q_proj.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    result = invoke(call)
    assert result.exit_code == 2
    assert "lacks model.layers.2.self_attn.q_proj.weight" in result.stderr
