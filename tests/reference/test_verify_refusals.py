"""What cannot be verified is said by name, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gemloupe import StandardizedTransformer, verify
from gemloupe.errors import BadArgument, UnsupportedModel
from gemloupe.reference.prompts import default_prompts
from gemloupe.testing import tiny, tiny_module, tiny_tokenizer
from tests.reference.test_weights import Packed, Sharded
from tests.test_plan import PUBLISHED

UP = "model.layers.2.mlp.up_proj.weight"


def wrapped(module: Any) -> Any:
    return StandardizedTransformer(module, tokenizer=tiny_tokenizer())


def with_state(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """The module's state dict holds another tensor."""

    def install(model: Any) -> None:
        module = model._module
        state = module.state_dict()
        module.state_dict = lambda *_, **__: state | {UP: change(state[UP])}

    return install


def with_weight(value: float) -> Callable[[Any], None]:
    def install(model: Any) -> None:
        with torch.no_grad():
            model._module.get_parameter(UP)[1, 2] = value

    return install


def without_norm(model: Any) -> None:
    model._module.model.layers[2].post_attention_layernorm = nn.Identity()


def with_adapter(model: Any) -> None:
    model._module.model.layers[2].mlp.up_proj.register_parameter("lora_A", nn.Parameter(torch.ones(2, 2)))


def of_another_family(model: Any) -> None:
    model.plan = replace(model.plan, model_type="gemma3_text")


REFUSED: dict[str, tuple[Callable[[Any], None], type[Exception], str]] = {
    "another family": (
        of_another_family,
        UnsupportedModel,
        "the reference defines gemma4_text and gemma4_unified_text, not gemma3_text",
    ),
    "quantized": (
        with_state(lambda w: w.to(torch.int8)),
        UnsupportedModel,
        f"{UP} is quantized (torch.int8): load the model in bfloat16 or float32.",
    ),
    "fp8": (with_state(lambda w: w.to(torch.float8_e4m3fn)), UnsupportedModel, f"{UP} is quantized"),
    "packed": (
        with_state(lambda w: w.as_subclass(Packed)),
        UnsupportedModel,
        f"{UP} is quantized (Packed)",
    ),
    "sharded": (
        with_state(lambda w: w.as_subclass(Sharded)),
        UnsupportedModel,
        f"{UP} is sharded over devices (Sharded): load the model whole.",
    ),
    "offloaded": (with_state(lambda w: w.to("meta")), UnsupportedModel, f"{UP} holds no numbers"),
    "NaN": (with_weight(torch.nan), BadArgument, f"{UP} holds NaN"),
    "infinity": (with_weight(torch.inf), BadArgument, f"{UP} holds infinity"),
    "a norm that is not there": (
        without_norm,
        BadArgument,
        "model.layers.2.post_attention_layernorm.weight is missing",
    ),
    "an adapter": (with_adapter, BadArgument, "model.layers.2.mlp.up_proj.lora_A"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_verified_is_refused_before_it_runs(case: str):
    install, kind, message = REFUSED[case]
    model = wrapped(tiny_module("e2b"))
    install(model)
    ran = []
    model._module.model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(kind, match=re.escape(message)):
        verify(model)
    assert not ran


@pytest.mark.parametrize("thing", [tiny_module("e2b"), "google/gemma-4-E2B", None])
def test_something_else_than_a_wrapped_model_is_refused(thing: Any):
    with pytest.raises(BadArgument, match=r"takes a wrapped model, not .*\n.*StandardizedTransformer"):
        verify(thing)


IDS = torch.tensor([[2, 30, 40, 0]])
WRONG: dict[str, tuple[Any, str]] = {
    "pixels": (
        {"input_ids": IDS, "pixel_values": torch.ones(1)},
        "given pixel_values, and this load of the model takes text alone",
    ),
    "positions": ({"input_ids": IDS, "position_ids": IDS}, "not position_ids"),
    "padding on the right": (
        {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 0]])},
        "pad on the left",
    ),
    "a hole": ({"input_ids": IDS, "attention_mask": torch.tensor([[1, 0, 1, 1]])}, "pad on the left"),
    "another mask": ({"input_ids": IDS, "attention_mask": torch.ones(1, 3).long()}, "[1, 3]"),
    "no real token": ({"input_ids": IDS, "attention_mask": torch.zeros(1, 4).long()}, "pad on the left"),
    "no ids": ({"attention_mask": IDS}, "verify takes text, or token ids"),
    "floats": (IDS.float(), "not Tensor"),
    "nothing": ([], "the list is empty. Leave it out for the built-in prompts."),
    "a number": (3, "not int"),
    "words and numbers": (["a", 3], "not list"),
    "three axes": (IDS[None], "verify takes text"),
    "unequal rows": ([[2, 30], [2]], "verify takes text"),
    "past the vocabulary": ([2, 288], "the vocabulary is 0 to 287"),
}


@pytest.mark.parametrize("case", WRONG)
def test_inputs_that_are_no_text_are_refused(case: str):
    inputs, message = WRONG[case]
    with pytest.raises(BadArgument, match=re.escape(message)):
        verify(tiny("e2b"), inputs)


# ---- the default inputs at real size ----------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", PUBLISHED.values(), ids=PUBLISHED)
def test_the_default_tokens_of_a_published_model(checkpoint: Any):
    plan = wrapped_plan(checkpoint)
    special = frozenset({1, 2, 258880, 255999})
    (long, every, *_), (ids, mask, *_) = default_prompts(plan, special, 2)
    assert long.shape == (1, plan.sliding_window + 7)
    assert bool(every.all())
    assert not special & set(long[0, 1:].tolist())
    assert len(set(long[0].tolist())) == long.shape[1]
    assert (mask.sum(-1) == torch.tensor([12, 7, 3])).all()
    assert ids[:, -1].ne(0).all()
    assert [int(row[real.bool()][0]) for row, real in zip(ids, mask, strict=True)] == [2, 2, 2]


def wrapped_plan(checkpoint: Any) -> Any:
    from gemloupe.plan import plan

    return plan(checkpoint.text_config())


def test_inside_a_trace_it_says_where_it_belongs():
    model = tiny("12b")
    with pytest.raises(BadArgument, match="call it outside the trace"):
        with model.trace(torch.tensor([[2, 40, 41]])):
            model.layers[0].layer_output
            verify(model)
    assert verify(model, torch.tensor([[2, 40, 41]])).held
