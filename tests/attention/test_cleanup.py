"""However a block ends, the next trace is as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gemloupe.errors import BadArgument, BadWrite, LateEdit, OutOfOrder
from gemloupe.testing import tiny
from tests.attention.values import CALL, OWN, attention, of_block
from tests.core.models import Case, ids
from tests.core.places import reading


class Oops(Exception):
    """Raised by these tests alone."""


def state(model: Any) -> dict[Any, Any]:
    """What a trace must leave as it was: hooks, forwards, settings and the registries of functions."""
    found: dict[Any, Any] = {"functions": dict(ALL_ATTENTION_FUNCTIONS), "grad": torch.is_grad_enabled()}
    found["tensor"] = (torch.Tensor.grad, torch.Tensor.backward)
    found["config"] = model._module.config.to_dict()
    found["implementation"] = model._module.config.get_text_config()._attn_implementation
    for name, module in model._module.named_modules():
        own = vars(module)
        hooks = {
            kind: list(value.values())
            for kind, value in own.items()
            if "hooks" in kind and isinstance(value, dict)
        }
        found[name] = (type(module), sorted(own), own.get("forward"), hooks, module.training)
    return found


CASES = [Case("e2b"), Case("26b-a4b", attention="eager", experts="batched_mm"), Case("e2b", batched=True)]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """A case whose model is looked at before and after the test."""
    case: Case = request.param
    model = case.model()
    block = 3
    (wanted, *_) = (
        of_block(values, block) for values in reading(case)
    )  # its first run instruments the model
    before = state(model)
    yield case
    assert state(model) == before
    assert not model.interleaver.interleaving
    assert model.interleaver.mediators == []
    logits: list[torch.Tensor] = []
    values: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        with model.trace() as tracer:
            for i, row in enumerate(case.prompts):
                with tracer.invoke(row):
                    if i == 0:
                        for name in (*OWN, *CALL):
                            values[name] = getattr(attention(model, block), name).save()
                    logits.append(model.logits.save())
    assert torch.equal(torch.cat(logits), case.logits())
    for name, value in values.items():
        assert torch.equal(value, wanted[name]), name
    assert torch.equal(model._module(**case.inputs).logits, case.logits())


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_the_first_trace_leaves_nothing_either(kernel):
    """No instrument stays on a module, nor a word in a registry."""
    model = tiny("e2b", attn_implementation=kernel)
    before = state(model)
    with pytest.raises(Oops):
        with model.trace(ids(7)):
            attention(model, 3).attention_probabilities[:, 0] = 0
            raise Oops
    assert state(model) == before
    with model.trace(ids(7)):
        attention(model, 3).attention_probabilities[:, 0] = 0
    model.collect(ids(7), "layers.*.self_attn.attention_scores", generate=2)
    assert state(model) == before


def interrupted(case: Case, body: Callable[[Any], None]) -> None:
    """A trace in which one invoke, the last, is interrupted."""
    model, (*others, row) = case.model(), case.prompts
    if not others:
        with model.trace(row):
            body(model)
        return
    with model.trace() as tracer:
        for other in others:
            with tracer.invoke(other):
                attention(model, 3).attention_probabilities[:, 0] = 0
                model.layers[4].layer_output[:] *= 2
        with tracer.invoke(row):
            body(model)


@pytest.mark.parametrize("name", [*OWN, *CALL])
@pytest.mark.parametrize("style", ["read", "assigned", "in place"])
def test_an_error_right_after_a_value_of_the_attention(case, name, style):
    def body(model: Any) -> None:
        value = getattr(attention(model, 3), name)
        if style == "assigned":
            setattr(attention(model, 3), name, value * 2)
        elif style == "in place":
            value[:] = 0
        raise Oops

    with pytest.raises(Oops):
        interrupted(case, body)


@pytest.mark.parametrize("error", [Oops, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interruption_of_any_kind(case, error):
    def body(model: Any) -> None:
        attention(model, 3).attention_probabilities[:, 0] = 0
        attention(model, 5 if model.num_layers > 6 else 4).attention_keys[:] *= 2
        raise error

    with pytest.raises(error):
        interrupted(case, body)


@pytest.mark.parametrize("error", [Oops, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["self_attn.q_proj", "self_attn.o_proj", "mlp"])
def test_an_error_in_the_model(case, error, where):
    model = case.model()

    def fail(*_: Any) -> None:
        raise error

    def body(model: Any) -> None:
        model.record("layers.*.layer_output")
        attention(model, 4).attention_scores[:, 0] = 0
        model.logits

    handle = model.layers[4]._module.get_submodule(where).register_forward_pre_hook(fail)
    try:
        with pytest.raises(error):
            interrupted(case, body)
    finally:
        handle.remove()


def test_a_stop_in_the_middle_of_an_edit(case):
    model = case.model()
    with model.trace(case.prompts[0]) as tracer:
        heads = attention(model, 2).attention_head_outputs.save()
        attention(model, 3).attention_probabilities[:, 0] = 0
        tracer.stop()
    assert torch.isfinite(heads).all()


def late(model: Any) -> None:
    value = attention(model, 3).attention_keys
    model.layers[4].layer_output
    value[:] = 0
    model.logits


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (lambda model: setattr(attention(model, 3), "attention_keys", torch.zeros(2)), BadWrite),
        (
            lambda model: (attention(model, 3).attention_output, attention(model, 3).attention_keys),
            OutOfOrder,
        ),
        (lambda model: model.steer(3, torch.zeros(7)), BadArgument),
        (lambda model: (model.record("logits"), model.collect(ids(3), "logits")), BadArgument),
        (late, LateEdit),
    ],
    ids=["bad write", "out of order", "bad argument", "collect", "late edit"],
)
def test_an_error_of_the_library(case, body, error):
    with pytest.raises(error):
        interrupted(case, body)


def test_an_error_in_a_backward_block(case):
    def body(model: Any) -> None:
        value = attention(model, 3).attention_head_outputs
        loss = model.logits.sum()
        with loss.backward():
            value.grad
            raise Oops

    with pytest.raises(Oops):
        interrupted(case, body)
    case.model()._module.zero_grad()


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("error", [Oops, KeyboardInterrupt])
def test_an_error_in_a_step_of_generate(case, step, error):
    model = case.model()
    with pytest.raises(error):
        with model.generate(case.prompts[0], max_new_tokens=3, do_sample=False, eos_token_id=None) as tracer:
            model.steer(1, torch.ones(40))
            model.record("layers.*.layer_output")
            for i in tracer.iter[:3]:
                attention(model, 3).own_values[:] *= 2
                if i == step:
                    raise error
                model.logits
    tokens = model.generate(case.prompts[0], max_new_tokens=3, do_sample=False, eos_token_id=None)
    bare = case.bare().generate(case.prompts[0], max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert torch.equal(tokens, bare)


def test_an_error_in_collect(case):
    model = case.model()

    def edits(model: Any) -> None:
        attention(model, 3).attention_probabilities[:, 0] = 0
        raise Oops

    for generate in (None, 2):
        with pytest.raises(Oops):
            model.collect(case.prompts[0], "layers.*.layer_output", edits=edits, generate=generate)
    with pytest.raises(BadArgument):
        model.collect(case.prompts[0], "layers.*.layer_output", positions=99)


def test_a_prompt_that_the_model_refuses(case):
    model = case.model()
    with pytest.raises(IndexError):
        with model.trace(torch.tensor([[2, 10_000]])):
            attention(model, 3).attention_probabilities[:] = 0
    with pytest.raises(IndexError):
        model.collect(torch.tensor([[2, 10_000]]), "logits")
