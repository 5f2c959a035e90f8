"""A run that is taken up, or a store that is there, is of the model as it computes now."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gemloupe import Store, harvest
from gemloupe.errors import BadArgument, HarvestStopped
from gemloupe.testing import tiny
from tests.harvesting.data import OUTPUT, forwards, rows_of_ids
from tests.harvesting.test_survives import fills_up


def small(out: Path, of: Any, values: Any = OUTPUT, **options: Any) -> Store:
    call = {"tokens_per_batch": 15, "shard_bytes": 6000, "progress": False} | options
    return harvest(of, rows_of_ids(), values, out, **call)


@contextmanager
def scalars(of: Any) -> Iterator[None]:
    """Buffers, not parameters."""
    for block in of.layers:
        block._module.layer_scalar.mul_(3)
    yield


@contextmanager
def one_number(of: Any) -> Iterator[None]:
    """One weight among many, which no sample would find."""
    weight = of.layers[2]._module.mlp.down_proj.weight
    with torch.no_grad():
        weight.view(-1)[1234] += 1
    yield


@contextmanager
def edited(of: Any) -> Iterator[None]:
    with of.edit(inplace=True):
        of.layers[2].layer_output[:] = 0.0
    yield


@contextmanager
def hooked(of: Any) -> Iterator[None]:
    handle = of.layers[2]._module.register_forward_hook(lambda _m, _a, output: output * 1.5)
    yield
    handle.remove()


@contextmanager
def cast(of: Any) -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "layer_scalar": (scalars, "another model's store: its model has other weights"),
    "one number": (one_number, "another model's store: its model has other weights"),
    "edit": (edited, "model edits: 0 there, 1 in this call"),
    "hook": (
        hooked,
        rf"holds another {OUTPUT.replace('[', '.').replace(']', '.')} than this model computes now",
    ),
    "autocast": (cast, "model autocast: None there, 'bfloat16' in this call"),
}


@pytest.mark.parametrize("state", ["complete", "begun"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_does_not_go_on(
    name: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    of = tiny("e2b")
    with monkeypatch.context() as patch, ExitStack() as stopped:
        if state == "begun":
            fills_up(patch, after=7, error=OSError(errno.ENOSPC, "No space left on device"))
            stopped.enter_context(pytest.raises(HarvestStopped))
        small(tmp_path, of)
    there = len(Store(tmp_path).shards)
    change, words = CHANGES[name]
    with change(of), forwards(of) as ran, pytest.raises(BadArgument, match=words) as error:
        small(tmp_path, of)
    assert "give another directory" in str(error.value).lower()
    assert len(ran) <= 1
    assert len(Store(tmp_path).shards) == there
    # What cannot be seen is named by its place.
    if name == "hook":
        assert "of sequence" in str(error.value)
        assert "a hook, an edit, a setting" in str(error.value)


@pytest.mark.parametrize(
    "value",
    [
        "self_attn.attention_scores",
        "self_attn.attention_probabilities",
        "self_attn.visible_keys",
        "mlp.mlp_output",
    ],
)
def test_every_kind_of_value_tells(value: str, tmp_path: Path):
    of = tiny("e2b")
    path = f"layers[4].{value}"
    small(tmp_path, of, path)
    record = Store(tmp_path).shards[0]
    assert small(tmp_path, of, path).complete
    # What is stored is changed as a hook would have changed it, with a record that fits.
    file = tmp_path / "shards" / record.file
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    rows = tensors[path]
    tensors[path] = ~rows if rows.dtype == torch.bool else torch.where(rows.isfinite(), rows * 1.1, rows)
    save_file(tensors, file)
    changed = hashlib.sha256(file.read_bytes()).hexdigest()
    for text in (tmp_path / "index.json", file.with_suffix(".json")):
        text.write_text(text.read_text().replace(record.sha256, changed))
    with pytest.raises(BadArgument, match=r"holds another .* than this model computes now"):
        small(tmp_path, of, path)


def test_an_observing_hook_and_another_path_of_the_model_go_on(tmp_path: Path):
    of: Any = tiny("e2b")
    small(tmp_path, of)
    of._module.config._name_or_path = "elsewhere"
    of._module.name_or_path = "elsewhere"
    with forwards(of) as ran:
        assert small(tmp_path, of).complete
    assert len(ran) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rounding_goes_on(dtype: torch.dtype, tmp_path: Path):
    of = tiny("26b-a4b", dtype=dtype)
    values = ["layers.*.layer_output", "layers[3].self_attn.attention_scores", "layers[2].mlp.expert_indices"]
    small(tmp_path, of, values)
    # As another machine rounds: a thousandth of what tells two models apart, or a bit of sixteen.
    shift = 1 + (1e-6 if dtype == torch.float32 else 2**-8)
    handle = of.layers[0]._module.register_forward_hook(lambda _m, _a, output: output * shift)
    assert small(tmp_path, of, values).complete
    handle.remove()


def test_seed_decides_nothing_without_a_sample(tmp_path: Path):
    of = tiny("e2b")
    small(tmp_path, of, seed=1)
    assert small(tmp_path, of, seed=2).index.options["seed"] is None
    small(tmp_path / "s", of, sample=2, seed=1)
    with pytest.raises(BadArgument, match="options seed: 1 there, 2 in this call"):
        small(tmp_path / "s", of, sample=2, seed=2)


def test_a_model_that_drops_out_is_refused(tmp_path: Path):
    of = tiny("e2b", attention_dropout=0.3)
    of._module.train()
    with (
        forwards(of) as ran,
        pytest.raises(BadArgument, match=r"training mode, and .* drops out 0\.3") as error,
    ):
        small(tmp_path / "s", of)
    assert "model.eval()" in str(error.value)
    assert ran == []
    of._module.eval()
    assert small(tmp_path / "s", of).complete
    plain = tiny("e2b")
    plain._module.train()  # nothing is drawn
    assert small(tmp_path / "plain", plain).complete


def test_inside_a_trace_it_is_refused(tmp_path: Path):
    of = tiny("e2b")
    with pytest.raises(Exception, match="harvest runs forwards of its own: call it outside the trace"):
        with of.trace([[2, 30, 31]]):
            small(tmp_path / "s", of)
    assert not (tmp_path / "s").exists()


def test_dtype_by_name(tmp_path: Path):
    store = small(tmp_path, tiny("e2b"), dtype="bfloat16")
    assert store[OUTPUT].dtype == torch.bfloat16
    with pytest.raises(BadArgument, match=r"dtype is one of .*not 'float99'"):
        small(tmp_path / "s", tiny("e2b"), dtype="float99")
