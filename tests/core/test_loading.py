"""What can be wrapped, what it is wrapped with, and what is refused before any weight is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
import transformers

from gemloupe import StandardizedTransformer
from gemloupe.errors import LoadError, UnsupportedModel
from gemloupe.testing import SHAPES, save_tiny, tiny_config, tiny_module, tiny_tokenizer
from tests.core.models import SEED, Case, ids
from tests.core.oracle import Oracle
from tests.core.places import Place, forward_order, read_all, rows_of

CLASSES = {
    ("12b", False): transformers.Gemma4UnifiedForCausalLM,
    ("12b", True): transformers.Gemma4UnifiedForConditionalGeneration,
    (None, False): transformers.Gemma4ForCausalLM,
    (None, True): transformers.Gemma4ForConditionalGeneration,
}
KNOWN = "known are gemma4_text, gemma4_unified_text"
both_loads = pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories with a model's weights and tokenizer, each written once."""
    written: dict[tuple[str, bool], Path] = {}

    def directory(shape: str, load: bool = False) -> Path:
        if (shape, load) not in written:
            place = tmp_path_factory.mktemp(shape)
            written[shape, load] = save_tiny(place, shape, wrapper=load, seed=SEED)
        return written[shape, load]

    return directory


# -- directories -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@both_loads
def test_a_saved_directory_is_dispatched_lazily_and_serves_everything(saved, shape, load):
    case = Case(shape, wrapper=load, batched=True)
    place = saved(shape, load)
    model = StandardizedTransformer(place)
    assert not model.dispatched
    assert {tensor.device.type for tensor in model._module.state_dict().values()} == {"meta"}
    assert model.has("layers[0].layer_output")
    assert len(forward_order(model)) > 10 * model.num_layers
    assert not model.dispatched
    found = read_all(model, case.prompts)
    assert model.dispatched
    cls = CLASSES.get((shape, load)) or CLASSES[None, load]
    assert type(model._module) is cls
    bare = cls.from_pretrained(place)
    with torch.no_grad():
        wanted = bare(**case.inputs).logits
    logits = torch.cat([values[Place("logits")] for values in found])
    assert torch.equal(logits, wanted)
    # The weights are the very ones, but lie where the file has them: some kernels round by alignment.
    memory = case.logits()
    assert (logits - memory).abs().max() <= 1e-5 * memory.abs().max()
    if shape != "26b-a4b":
        assert torch.equal(logits, memory)
    for invoke, values in enumerate(found):
        for path, value in Oracle(bare).expected(values, rows_of(case.inputs, invoke)).items():
            if value.is_floating_point() and path.name != "attention_projection":
                assert (values[path] - value).abs().max() <= 1e-5 * value.abs().max(), path


def test_a_reloaded_mixture_is_bit_equal_where_its_kernel_does_not_ask_for_alignment(saved):
    case = Case("26b-a4b", experts="batched_mm")
    model = StandardizedTransformer(saved("26b-a4b"), experts_implementation="batched_mm")
    with model.trace(case.prompts[0]):
        logits = model.logits.save()
    assert torch.equal(logits, case.logits())


@pytest.mark.parametrize("as_text", [True, False], ids=["str", "Path"])
def test_a_target_is_a_path_or_its_text(saved, as_text, monkeypatch):
    place = saved("e2b")
    monkeypatch.chdir(place.parent)
    relative = Path(place.name)
    model = StandardizedTransformer(str(relative) if as_text else relative)
    assert model.num_layers == 10


def test_the_tokenizer_of_the_directory_is_taken(saved):
    model = StandardizedTransformer(saved("e2b"))
    with model.trace("a cat"):
        given = model.input_ids.save()
    assert given.tolist() == [tiny_tokenizer()("a cat")["input_ids"]]
    with model.trace() as tracer:
        with tracer.invoke("a cat"):
            short = model.attention_mask.save()
        with tracer.invoke("a caterpillar"):
            model.logits.save()
    assert short.tolist() == [[0] * 8 + [1] * 6]


def test_weights_load_at_once_where_asked(saved):
    model = StandardizedTransformer(saved("e2b"), dispatch=True)
    assert model.dispatched
    assert {tensor.device.type for tensor in model._module.state_dict().values()} == {"cpu"}


def test_what_is_passed_on_reaches_the_model(saved):
    options = {
        "dtype": torch.bfloat16,
        "attn_implementation": "eager",
        "experts_implementation": "batched_mm",
        "device": "cpu",
        "revision": "main",
        "task": "text-generation",
    }
    case = Case("26b-a4b", attention="eager", experts="batched_mm", dtype=torch.bfloat16)
    model = StandardizedTransformer(saved("26b-a4b"), **options)
    for dispatched in (False, True):
        assert model.dispatched == dispatched
        config: Any = model._module.config
        assert config._attn_implementation == "eager"
        assert config._experts_implementation == "batched_mm"
        assert {tensor.dtype for tensor in model._module.parameters()} == {torch.bfloat16}
        with model.trace(case.prompts[0]):
            logits = model.logits.save()
    assert model.task == "text-generation"
    assert logits.dtype == torch.bfloat16
    assert (logits - case.logits()).abs().max() <= 0.05 * case.logits().abs().max()


def test_a_tokenizer_can_be_given(tmp_path):
    tiny_module("e2b").save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="has no tokenizer that loads; give `tokenizer="):
        StandardizedTransformer(tmp_path)
    tokenizer = tiny_tokenizer()
    model = StandardizedTransformer(tmp_path, tokenizer=tokenizer)
    assert model.tokenizer is tokenizer
    with model.trace("a cat"):
        given = model.input_ids.save()
    assert given.shape == (1, 6)


def test_a_config_can_be_given(saved):
    place = saved("31b")
    config = transformers.AutoConfig.from_pretrained(place)
    config.final_logit_softcapping = None
    model = StandardizedTransformer(place, config=config)
    assert model.plan.logit_cap is None
    with model.trace(ids(5)):
        raw = model.raw_logits.save()
        logits = model.logits.save()
    assert torch.equal(raw, logits)


def test_weights_are_placed_where_a_map_says(saved):
    pytest.importorskip("accelerate", reason="transformers needs accelerate wherever device_map is passed")
    case = Case("e2b")
    model = StandardizedTransformer(saved("e2b"), device_map="cpu")
    with model.trace(case.prompts[0]):
        logits = model.logits.save()
    assert torch.equal(logits, case.logits())


# -- modules -----------------------------------------------------------------------------------------


def test_a_loaded_module_is_wrapped_as_it_is():
    module = tiny_module("e2b", attn_implementation="eager", dtype=torch.bfloat16)
    model = StandardizedTransformer(module, tokenizer=tiny_tokenizer())
    assert model._module is module
    assert model.dispatched
    assert (model.attn_implementation, module.dtype) == ("eager", torch.bfloat16)


def test_a_module_without_a_tokenizer_takes_ids_and_says_so_of_text():
    case = Case("e2b")
    model = StandardizedTransformer(tiny_module("e2b", seed=SEED))
    with model.trace(case.prompts[0]):
        logits = model.logits.save()
    assert torch.equal(logits, case.logits())
    with pytest.raises(LoadError, match=r"wrapped without a tokenizer, so it takes token ids and no text"):
        with model.trace("a cat"):
            model.logits.save()
    with model.trace() as tracer:
        with tracer.invoke(ids(5)):
            model.logits.save()
        with tracer.invoke(ids(3)):
            mask = model.attention_mask.save()
    assert mask.tolist() == [[0, 0, 1, 1, 1]]


@pytest.mark.parametrize("load", ["text", "wrapper", "unified"])
def test_a_module_without_a_head_is_refused(load):
    shape = "12b" if load == "unified" else "e2b"
    module = tiny_module(shape, wrapper=load == "wrapper").model
    with pytest.raises(UnsupportedModel, match=r"has no head.*\*ForCausalLM or \*ForConditionalGeneration"):
        StandardizedTransformer(module)


# -- refusals ----------------------------------------------------------------------------------------


def small(kind: str) -> Any:
    if kind == "gpt2":
        return transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2)
    if kind == "llama":
        return transformers.LlamaConfig(num_hidden_layers=1)
    return transformers.Gemma3TextConfig(num_hidden_layers=1)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma3_text"])
def test_another_model_type_is_refused_before_any_weight_is_read(kind, tmp_path):
    small(kind).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(UnsupportedModel, match=f"model type '{kind}' is not supported; {KNOWN}"):
        StandardizedTransformer(tmp_path)


def test_a_module_of_another_type_is_refused():
    with pytest.raises(UnsupportedModel, match=f"model type 'gpt2' is not supported; {KNOWN}"):
        StandardizedTransformer(transformers.GPT2LMHeadModel(small("gpt2")))


def test_a_module_without_a_config_is_refused():
    with pytest.raises(UnsupportedModel, match="Linear has no transformers config; pass a repo id"):
        StandardizedTransformer(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("load", [False, True], ids=["text", "wrapper"])
def test_a_setting_that_was_not_considered_is_refused_by_name(load, tmp_path):
    config = tiny_config("e2b", wrapper=load)
    config.get_text_config().rope_magic = 3
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"rope_magic=3: Gemloupe has not considered"):
        StandardizedTransformer(tmp_path)
    with pytest.raises(UnsupportedModel, match="rope_magic"):
        StandardizedTransformer(tiny_module("e2b", config=config))


def test_a_directory_without_weights_is_refused(tmp_path):
    tiny_config("e2b").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    wanted = f"{tmp_path} has a config but no weights (*.safetensors)"
    with pytest.raises(LoadError, match=re.escape(wanted)) as refused:
        StandardizedTransformer(tmp_path)
    assert f"python -m gemloupe inspect {tmp_path}" in str(refused.value)


def write(place: Path, name: str, text: str) -> Path:
    place.mkdir(exist_ok=True)
    (place / name).write_text(text)
    return place


def config(place: Path, text: str) -> Path:
    return write(place, "config.json", text)


NO_MODELS: dict[str, tuple[Any, type[Exception], str]] = {
    "an empty directory": (lambda place: place, LoadError, "has no config.json"),
    "no directory": (lambda place: place / "nothing", LoadError, "is no directory with a config"),
    "its text": (lambda place: str(place / "nothing"), LoadError, "is no directory with a config"),
    "a file": (lambda place: write(place, "a.txt", "hello") / "a.txt", LoadError, "is no directory with a"),
    "broken": (lambda place: config(place, "{not json"), LoadError, "is no directory with a config"),
    "no type": (lambda place: config(place, "{}"), UnsupportedModel, "does not know the model type"),
    "a new type": (lambda place: config(place, '{"model_type": "gemma9"}'), UnsupportedModel, "gemma9"),
    "a number": (lambda _: 3, LoadError, "a model is a repo id, a directory or a module, not int"),
    "nothing": (lambda _: None, LoadError, "a model is a repo id, a directory or a module, not NoneType"),
}


@pytest.mark.parametrize("name", NO_MODELS)
def test_what_is_no_model_gets_one_clear_line(name, tmp_path):
    make, error, message = NO_MODELS[name]
    with pytest.raises(error, match=re.escape(message)):
        StandardizedTransformer(make(tmp_path))


def test_a_repo_that_cannot_be_reached_is_no_model(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="nobody/nothing is no directory or reachable repo id with a config"):
        StandardizedTransformer("nobody/nothing")


def test_errors_are_python_s_own_too():
    """So that code which knows nothing of the package catches them as it does elsewhere."""
    with pytest.raises(OSError, match="is no directory with a config"):
        StandardizedTransformer("./nothing")
    with pytest.raises(ValueError, match="no transformers config"):
        StandardizedTransformer(torch.nn.Linear(2, 2))
