"""The two tables of a family: every row matches in some tiny model; rows and families can be added."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gemloupe import StandardizedTransformer, families
from gemloupe.envoys.layer import Layer
from gemloupe.envoys.mlp import Mlp
from gemloupe.errors import Unavailable, UnsupportedModel
from gemloupe.families import Family, family, gemma4_text, gemma4_unified_text, known_families, register
from gemloupe.layouts import Residual
from gemloupe.served import served
from gemloupe.testing import SHAPES, tiny_module, tiny_tokenizer
from tests.core.models import Case, ids

MODULES = {"gemma4_text": gemma4_text, "gemma4_unified_text": gemma4_unified_text}
OF_SHAPE = {shape: "gemma4_unified_text" if shape == "12b" else "gemma4_text" for shape in SHAPES}
LOADS = [(shape, load) for shape in SHAPES for load in (False, True)]
# What the document the project was created from lists.
LISTED = {
    "model.embed_tokens": "embed_tokens",
    "model.layers": "layers",
    "model.norm": "norm",
    "model.language_model.embed_tokens": "embed_tokens",
    "model.language_model.layers": "layers",
    "model.language_model.norm": "norm",
    "model.vision_tower": "vision",
    "model.embed_vision": "projector",
    "patch_embedder.input_proj": "patch_embed",
    "encoder.layers": "layers",
}
ENVOYS_LISTED = {
    "Gemma4TextDecoderLayer": "Layer",
    "Gemma4TextAttention": "Attention",
    "Gemma4TextMLP": "Mlp",
}


def envoys(model: Any) -> dict[str, Any]:
    """Every envoy by its native path, the root's name left out."""
    return {path.partition(".")[2]: envoy for path, envoy in model.modules(names=True)}


def ends(path: str, suffix: str) -> bool:
    return path == suffix or path.endswith(f".{suffix}")


@pytest.mark.parametrize(
    ("kind", "row"), [(kind, row) for kind, module in MODULES.items() for row in module.RENAME.items()]
)
def test_every_rename_row_reaches_the_module_in_some_model(kind, row):
    native, given = row
    names = [given] if isinstance(given, str) else given
    found = 0
    for shape, load in LOADS:
        if OF_SHAPE[shape] != kind:
            continue
        model = Case(shape, wrapper=load).model()
        for path, envoy in envoys(model).items():
            if ends(path, native):
                owner = model if path == native else envoys(model)[path.removesuffix(native).rstrip(".")]
                assert all(getattr(owner, name) is envoy for name in names), path
                found += 1
    assert found


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, module in MODULES.items() for key in module.ENVOYS], ids=str
)
def test_every_envoy_row_makes_an_envoy_in_some_model(kind, key):
    wanted = MODULES[kind].ENVOYS[key]
    found = 0
    for shape, load in LOADS:
        if OF_SHAPE[shape] != kind:
            continue
        model = Case(shape, wrapper=load).model()
        for path, envoy in envoys(model).items():
            if ends(path, key) if isinstance(key, str) else isinstance(envoy._module, key):
                assert type(envoy) is wanted, path
                found += 1
    assert found


def test_the_tables_have_what_the_document_lists():
    assert LISTED.items() <= gemma4_text.RENAME.items()
    classes = {
        key.__name__: value.__name__ for key, value in gemma4_text.ENVOYS.items() if not isinstance(key, str)
    }
    assert ENVOYS_LISTED.items() <= classes.items()
    unified = {native for native in gemma4_unified_text.RENAME if native in LISTED}
    assert unified == {n for n in LISTED if n.startswith("model.")} - {"model.vision_tower"}


@pytest.mark.parametrize(("shape", "load"), LOADS)
def test_standard_names_are_the_native_modules(shape, load):
    model = Case(shape, wrapper=load).model()
    stack = model._module.model.language_model if load else model._module.model
    assert model.embed_tokens._module is stack.embed_tokens
    assert model.layers._module is stack.layers
    assert model.norm._module is stack.norm
    assert model.lm_head._module is model._module.lm_head
    for block, native in zip(model.layers, stack.layers, strict=True):
        assert block._module is native
        assert block.self_attn._module is native.self_attn
        assert block.mlp._module is native.mlp


@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_says_its_family_and_plan(shape):
    model = Case(shape).model()
    assert model.family.model_type == OF_SHAPE[shape] == model.plan.model_type
    assert isinstance(model.family, Family)


# -- one's own rows ----------------------------------------------------------------------------------


class Loud(Mlp):
    """An envoy of the user's, with a value of its own."""

    @served("output")
    def mlp_dense(self, value: Any) -> Residual:
        """The dense MLP's output.

        Layout: [batch seq hidden].
        """
        return value


def test_rows_can_be_added():
    module = tiny_module("e2b")
    model = StandardizedTransformer(
        module,
        tokenizer=tiny_tokenizer(),
        rename={"model.embed_tokens_per_layer": "table", "mlp.down_proj": "down"},
        envoys={transformers.models.gemma4.modeling_gemma4.Gemma4TextMLP: Loud},
    )
    assert model.table._module is module.model.embed_tokens_per_layer
    assert model.layers[0].down._module is module.model.layers[0].mlp.down_proj
    assert type(model.layers[0].mlp) is Loud
    assert type(model.layers[0]) is Layer
    with model.trace(ids(5)):
        dense = model.layers[0].mlp.mlp_dense.save()
        projected = model.layers[0].mlp.mlp_projection.save()
        output = model.layers[0].mlp.mlp_output.save()
    assert torch.equal(dense, projected)
    assert not torch.equal(dense, output)
    assert model.has("layers[3].mlp.mlp_dense")


# -- one's own family --------------------------------------------------------------------------------


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(families._MODULES)
    yield
    families._MODULES.clear()
    families._MODULES.update(before)


def test_a_family_can_be_registered(registry, monkeypatch, tmp_path):
    """One that serves GPT-2's stream by the standard names, with a plan of its own."""
    (tmp_path / "family_of_mine.py").write_text(FAMILY)
    monkeypatch.syspath_prepend(tmp_path)
    register("gpt2", "family_of_mine")
    assert "gpt2" in known_families()
    assert "family_of_mine" not in sys.modules
    config = transformers.GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=300)
    module = transformers.GPT2LMHeadModel(config).eval()
    model = StandardizedTransformer(module, tokenizer=tiny_tokenizer())
    assert "family_of_mine" in sys.modules
    with model.trace(ids(4)):
        out = model.layers[1].layer_output.save()
        received = model.layers[2].input.save()
        logits = model.logits.save()
    assert torch.equal(out, received)
    with torch.no_grad():
        assert torch.equal(logits, module(ids(4)).logits)
    with pytest.raises(Unavailable, match="no per-layer embeddings"):
        model.per_layer_inputs
    with pytest.raises(UnsupportedModel, match="'gpt2' is registered already, by family_of_mine"):
        register("gpt2", "another")


FAMILY = '''
from transformers.models.gpt2 import modeling_gpt2 as native

from gemloupe.envoys.base import Blocks, StandardEnvoy
from gemloupe.layouts import Residual
from gemloupe.plan import ModelPlan
from gemloupe.served import served


class Block(StandardEnvoy):
    @served("output")
    def layer_output(self, value) -> Residual:
        """The stream leaving the block."""
        return value


RENAME = {"transformer.h": "layers", "transformer.wte": "embed_tokens", "transformer.ln_f": "norm"}
ENVOYS = {native.GPT2Block: Block, "h": Blocks}


def plan(config):
    return ModelPlan(
        model_type="gpt2", hidden_size=config.n_embd, vocab_size=config.vocab_size, num_layers=config.n_layer,
        num_heads=config.n_head, head_dim=config.n_embd // config.n_head, num_kv_heads=config.n_head,
        intermediate_size=4 * config.n_embd, sliding_window=0, logit_cap=None, norm_eps=1e-5,
        max_positions=config.n_positions, bidirectional=None, tied=True, per_layer_input_size=None,
        vocab_size_per_layer_input=None, blocks=(), wrapper=False, vision=None, audio=None,
    )
'''


def test_a_family_without_a_plan_has_the_package_s(registry, monkeypatch):
    module = types.ModuleType("another_of_mine")
    module.__dict__.update(RENAME={}, ENVOYS={})
    monkeypatch.setitem(sys.modules, "another_of_mine", module)
    register("gemma9_text", "another_of_mine")
    assert family("gemma9_text").plan is family("gemma4_text").plan


@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_unified_text"])
def test_a_known_family_cannot_be_replaced(registry, name):
    with pytest.raises(UnsupportedModel, match=f"'{name}' is registered already"):
        register(name, "another")
    assert known_families() == ("gemma4_text", "gemma4_unified_text")


def test_an_unknown_family_says_how_to_add_one():
    with pytest.raises(UnsupportedModel, match=re.escape("`gemloupe.families.register(model_type, module)`")):
        family("gemma9_text")


def test_a_family_is_imported_on_first_use():
    """In a process of its own: here both are long imported."""
    import subprocess

    code = (
        "import sys, gemloupe.families as f\n"
        "assert not any('modeling_gemma4' in name for name in sys.modules)\n"
        "f.family('gemma4_unified_text')\n"
        "print(*sorted(n.rpartition('.')[2] for n in sys.modules if n.startswith('gemloupe.families.')))"
    )
    source = str(Path(families.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": source}
    )
    assert done.stdout.split() == ["gemma4_unified_text"]
