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
from gemloupe.errors import BadArgument, HarvestStopped, StoreWarning
from gemloupe.harvesting import index, work
from gemloupe.harvesting.again import _apart
from gemloupe.harvesting.index import model_facts
from gemloupe.testing import tiny
from tests.harvesting.data import OUTPUT, files, forwards, lose, rows_of_ids
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
    with multiplied(of, 0, shift), pytest.warns(StoreWarning, match="bit for bit") as told:
        assert small(tmp_path, of, values).complete
    assert "Another machine, device or number of threads explains that" in str(told[0].message)
    assert told[0].filename == __file__


@pytest.mark.parametrize("beside", [[], ["layers[4].self_attn.visible_keys"]], ids=["alone", "beside a mask"])
def test_what_float32_and_a_mask_tell(beside: list[str], tmp_path: Path):
    of = tiny("e2b")
    small(tmp_path, of, [OUTPUT, *beside])
    with multiplied(of, 2, 1.01), pytest.raises(BadArgument, match="than this model computes now"):
        small(tmp_path, of, [OUTPUT, *beside])


def test_a_change_of_few_rows_is_told(tmp_path: Path):
    of = tiny("e2b")
    small(tmp_path, of)

    def last(_m: Any, _a: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[:, :-1], output[:, -1:] * 2], 1)

    handle = of.layers[2]._module.register_forward_hook(last)
    with pytest.warns(StoreWarning, match=r"a row of layers\[3\]\.layer_output is 0\.\d+ of its norm apart"):
        small(tmp_path, of)
    handle.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layer", [3, 4], ids=["sliding", "full"])
def test_scores_tell_under_eager_attention_where_hidden_keys_are_the_lowest_number(
    layer: int, dtype: torch.dtype, tmp_path: Path
):
    of = tiny("e2b", attn_implementation="eager", dtype=dtype)
    texts = [[2, *range(30 + at, 60 + at)] for at in range(4)]
    path = f"layers[{layer}].self_attn.attention_scores"
    harvest(of, texts, path, tmp_path, progress=False)
    handle = of.layers[1]._module.register_forward_hook(lambda _m, _a, output: torch.randn_like(output))
    with pytest.raises(BadArgument, match="than this model computes now"):
        harvest(of, texts, path, tmp_path, progress=False)
    handle.remove()


def test_experts_that_change_places_are_the_same(tmp_path: Path):
    of = tiny("26b-a4b")
    path = "layers[2].mlp.expert_indices"
    stored = small(tmp_path, of, path)[path][:]
    assert float(_apart(stored, stored.flip(-1)).max()) == 0
    assert float(_apart(stored, (stored + 1) % 8).median()) == 1


@contextmanager
def multiplied(of: Any, layer: int, factor: float) -> Iterator[None]:
    handle = of.layers[layer]._module.register_forward_hook(lambda _m, _a, output: output * factor)
    yield
    handle.remove()


# ---- which model it is -------------------------------------------------------------------------------------


def weights(of: Any) -> str:
    return model_facts(of)["weights"]


def test_the_weights_checksum_depends_on_their_order(tmp_path: Path):
    of: Any = tiny("e2b")
    before = weights(of)
    table = of._module.model.embed_tokens.weight
    with torch.no_grad():
        table[[100, 110]] = table[[110, 100]]
    assert weights(of) != before
    with torch.no_grad():
        table[[100, 110]] = table[[110, 100]]
    assert weights(of) == before


@pytest.mark.parametrize("kind", ["unaligned", "sparse", "extra", "odd", "empty", "bool"])
def test_weights_of_any_make_have_a_checksum(kind: str):
    of: Any = tiny("e2b")
    module = of._module
    plain = weights(of)
    if kind == "extra":
        type(module.lm_head).get_extra_state = lambda _self: {"scale": 1}
        try:
            assert weights(of) == plain
        finally:
            del type(module.lm_head).get_extra_state
        return
    flat = torch.arange(1, 100, dtype=torch.bfloat16)
    made = {
        "unaligned": flat[1:50],
        "sparse": torch.eye(3).to_sparse(),
        "odd": torch.arange(7, dtype=torch.uint8),
        "empty": torch.zeros(0, 4),
        "bool": torch.tensor([True, False, True]),
    }[kind]
    module.register_buffer("own", made)
    first = weights(of)
    assert first != plain
    assert weights(of) == first
    if made.numel():
        other = made.to_dense().clone()
        other.view(-1)[-1] = 0 if float(other.view(-1)[-1]) else 1
        module.own = other
        assert weights(of) != first


def test_what_does_not_decide_what_is_computed_does_not_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    of: Any = tiny("e2b")
    wanted = files(small(tmp_path, of).path)
    of._module.config.use_cache = not of._module.config.use_cache
    of._module.config.output_hidden_states = True
    now = work.versions()
    monkeypatch.setattr(work, "versions", lambda: {**now, "python": "3.99.1"})
    (tmp_path / "index.json").rename(tmp_path / ".index")
    small(tmp_path, of)  # made again of the shards, by their own record
    (tmp_path / ".index").rename(tmp_path / "index.json")
    lose(tmp_path, 1)
    small(tmp_path, of)
    assert files(tmp_path) == wanted  # with what was written at first


def test_a_model_that_lies_partly_on_the_disk_goes_on_with_what_it_can_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    of: Any = tiny("e2b")
    wanted = files(small(tmp_path, of).path)
    lose(tmp_path, 1)
    monkeypatch.setattr(index, "_weights", lambda _: None)
    assert small(tmp_path, of).complete
    assert files(tmp_path) == wanted
    of._module.config._name_or_path = of._module.name_or_path = "elsewhere"
    with pytest.raises(BadArgument, match=r"model name: '.*' there, 'elsewhere' in this call"):
        small(tmp_path, of)


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
