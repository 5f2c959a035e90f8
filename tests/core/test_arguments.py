"""What a call is given and cannot be meant is refused; nothing is taken in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemloupe.errors import BadArgument, BadWrite, UnknownName
from gemloupe.testing import tiny
from tests.core.models import Case, ids

TEXT = "a cat"


def ran(model: Any, call: str, inputs: tuple, options: dict[str, Any]) -> None:
    if call == "collect":
        model.collect(*inputs, "logits", **options)
        return
    with getattr(model, call)(*inputs, **options):
        model.logits.save()


@pytest.mark.parametrize("call", ["trace", "generate", "collect"])
@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (5, "not 5"),
        (True, "not True"),
        ([], r"the prompt is empty: \[\]"),
        ("", "the prompt is empty: ''"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused(call, prompt, named):
    with pytest.raises(BadArgument, match=named):
        ran(Case("e2b").model(), call, (prompt,), {})


@pytest.mark.parametrize("call", ["trace", "generate"])
@pytest.mark.parametrize("inputs", [(TEXT, "Hi"), (TEXT, 3), (TEXT, ids(4))], ids=["text", "number", "ids"])
def test_a_second_input_is_refused_and_not_left_out(call, inputs):
    with pytest.raises(BadArgument, match=r"2 were given.*`trace\(\[one, other\]\)`"):
        ran(Case("e2b").model(), call, inputs, {})


def test_an_invoke_takes_one_input_too():
    model = Case("e2b").model()
    with pytest.raises(BadArgument, match="2 were given"):
        with model.trace() as tracer:
            with tracer.invoke(ids(4), ids(5)):
                model.logits.save()


@pytest.mark.parametrize("call", ["trace", "collect"])
@pytest.mark.parametrize("prompt", [TEXT, ids(5), [TEXT, "a dog"]], ids=["text", "ids", "texts"])
@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("max_new_tokens", "`max_new_tokens` is an option of `generate`"),
        ("temperature", "`temperature` is an option of `generate`"),
        ("batch_size", "`batch_size` does nothing here"),
        ("attention_masks", "Did you mean `attention_mask`"),
        ("fooo", "no argument `fooo`"),
    ],
)
def test_a_keyword_that_a_forward_does_not_look_at_is_refused(call, prompt, option, named):
    with pytest.raises(BadArgument, match=named):
        ran(Case("e2b").model(), call, (prompt,), {option: 3})


@pytest.mark.parametrize("wrapper", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"use_cache": True}, {"logits_to_keep": 1}, {"output_hidden_states": True}, {"output_attentions": True}],
    ids=str,
)
def test_what_a_forward_looks_at_is_passed_on(wrapper, options):
    case = Case("31b", wrapper=wrapper, attention="eager")
    model = case.model()
    with torch.no_grad():
        with model.trace(ids(5), **options):
            logits = model.logits.save()
        assert torch.equal(logits, case.bare()(ids(5), **options).logits)


@pytest.mark.parametrize("generate", [2.5, "three", True, 0], ids=str)
def test_a_generation_is_a_number_of_tokens_or_options(generate):
    with pytest.raises(BadArgument, match="collect: generate is a number of new tokens"):
        Case("e2b").model().collect(ids(4), "logits", generate=generate)


def test_a_dtype_is_torch_s():
    with pytest.raises(BadArgument, match="not 'float32'"):
        Case("e2b").model().collect(ids(4), "logits", dtype="float32")


# -- assignments that reach nothing ------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 0.5, torch.zeros(1)], ids=["int", "float", "tensor"])
@pytest.mark.parametrize("traced", [False, True])
def test_a_misspelt_assignment_is_refused(value, traced):
    model = Case("e2b").model()
    with pytest.raises(UnknownName, match=r"layers\[3\] has no `layer_outptu`.*`layer_output`"):
        if traced:
            with model.trace(ids(4)):
                model.layers[3].layer_outptu = value
        else:
            model.layers[3].layer_outptu = value


def test_a_weight_is_not_assigned_and_changes_in_place():
    model = tiny("e2b")
    before = float(model.layers[3].layer_scalar)
    for value in (2.0, torch.ones(1)):
        with pytest.raises(BadWrite, match=r"layers\[3\]\.layer_scalar is a weight"):
            model.layers[3].layer_scalar = value
    assert float(model.layers[3].layer_scalar) == before
    with torch.no_grad():
        model.layers[3].layer_scalar *= 2
    assert float(model.layers[3].layer_scalar) == 2 * before
    module: Any = model._module
    assert float(module.model.layers[3].layer_scalar) == 2 * before


@pytest.mark.parametrize("name", ["k_proj", "k_norm", "v_proj", "v_norm"])
def test_a_projection_that_a_borrower_lacks_says_why(name):
    model = Case("e2b").model()
    assert not hasattr(model.layers[7].self_attn, name)
    with pytest.raises(AttributeError, match="it borrows block 3's"):
        getattr(model.layers[7].self_attn, name)
    assert hasattr(model.layers[3].self_attn, name)


def test_values_made_of_the_keys_projection_say_so():
    model = Case("31b").model()
    block = next(layer for layer in model.layers if layer.kind == "full")
    with pytest.raises(AttributeError, match=r"has no v_proj: its values are its keys' projection"):
        block.self_attn.v_proj


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("layer_output", "layers[i].layer_output"),
        ("attention_pattern", "layers[i].self_attn.attention_probabilities"),
        ("mlp_neurons", "layers[i].mlp.mlp_neurons"),
    ],
)
def test_a_block_s_value_asked_of_the_model_says_where_it_is(name, meant):
    with pytest.raises(UnknownName) as raised:
        getattr(Case("e2b").model(), name)
    assert f"Did you mean `{meant}`?" in str(raised.value)


def test_a_part_of_a_model_that_is_gone_says_so():
    mlp = tiny("e2b").layers[2].mlp
    with pytest.raises(UnknownName, match="a model that is gone"):
        mlp.reroutee
