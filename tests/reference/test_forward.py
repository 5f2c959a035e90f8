"""The reference against the models that transformers builds: every value, in every shape."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor

from gemloupe.reference import block, entrance, forward, head, names, sight
from gemloupe.testing import SHAPES
from tests.reference.served import Case, case, difference, layout, on_tokens

BY_BLOCK: Final = 2e-5
END_TO_END: Final = 2e-4
# What remains in a float64 model, whose norms, softmax and rotary tables transformers computes in float32.
# It grows from block to block as in a float32 model; `test_exact` takes it away.
BY_BLOCK_IN_FLOAT64: Final = 1e-5

CASES: Final = [
    case(shape, wrapper=wrapper, batched=batched)
    for shape in SHAPES
    for wrapper in (False, True)
    for batched in (False, True)
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def alone(case: Case, index: int) -> dict[str, Tensor]:
    """The reference's block `index`, run from the stream that the model's own block received."""
    served, at = case.collected, f"layers[{index}]"
    plan = case.plan.blocks[index]
    attention = f"layers[{plan.kv_source}].self_attn.attention"
    return block(
        case.weights,
        index,
        served[f"{at}.layer_input"],
        sight(case.plan, case.mask),
        per_layer_input=served.get(f"{at}.per_layer_input"),
        borrowed=(served[f"{attention}_keys"], served[f"{attention}_values"]) if plan.borrows_keys else None,
    )


def by_block(case: Case) -> dict[str, Tensor]:
    """Every value, each part of the model run from what the model itself gave it."""
    last = case.collected[f"layers[{case.plan.num_layers - 1}].layer_output"]
    found = {"input_ids": case.inputs["input_ids"], "attention_mask": case.mask}
    found |= entrance(case.weights, case.inputs["input_ids"])
    for index in range(case.plan.num_layers):
        found |= alone(case, index)
    return found | head(case.weights, last)


def end_to_end(case: Case) -> dict[str, Tensor]:
    return forward(case.config, case.state, case.inputs["input_ids"], case.mask)


def differences(case: Case, found: dict[str, Tensor]) -> dict[str, float]:
    assert tuple(found) == names(case.plan)
    return {name: difference(name, case.collected[name], value, case.mask) for name, value in found.items()}


def too_far(case: Case, found: dict[str, Tensor], tolerance: float) -> dict[str, float]:
    return {name: far for name, far in differences(case, found).items() if not far <= tolerance}


# ---- against the model ------------------------------------------------------------------------------------


@each_case
def test_every_value_is_served_as_defined_block_by_block(case: Case):
    assert not too_far(case, by_block(case), BY_BLOCK)


@each_case
def test_every_value_is_served_as_defined_end_to_end(case: Case):
    assert not too_far(case, end_to_end(case), END_TO_END)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_float64_model_differs_by_what_transformers_rounds_to_float32(shape: str):
    experts = "eager" if shape == "26b-a4b" else None  # grouped_mm refuses float64
    double = case(shape, batched=True, dtype=torch.float64, experts=experts)
    assert not too_far(double, by_block(double), BY_BLOCK_IN_FLOAT64)
    assert not too_far(double, end_to_end(double), END_TO_END)


@pytest.mark.parametrize("shape", SHAPES)
def test_embeddings_are_scaled_as_a_bfloat16_model_scales_them(shape: str):
    low = case(shape, dtype=torch.bfloat16)
    values = entrance(low.weights, low.inputs["input_ids"])
    for name in {"token_embeddings", "per_layer_token_inputs"} & values.keys():
        # One product, rounded once: not a bit may differ.
        assert torch.equal(low.collected[name], values[name].bfloat16())


VARIANTS: Final = [
    ("31b", {"tie_word_embeddings": False}),
    ("e2b", {"final_logit_softcapping": None}),
    ("e4b", {"rms_norm_eps": 0.5}),
    ("e2b", {"use_bidirectional_attention": "all"}),
    ("12b", {"use_bidirectional_attention": "all"}),
    ("26b-a4b", {"use_double_wide_mlp": True}),
    ("e4b", {"use_double_wide_mlp": True}),
    ("31b", {"sliding_window": 1}),
]


@pytest.mark.parametrize(("shape", "fields"), VARIANTS, ids=lambda value: str(value))
def test_what_a_config_says_otherwise_is_computed_otherwise(shape: str, fields: dict[str, Any]):
    other = case(shape, batched=True, overrides=tuple(fields.items()))
    assert not too_far(other, by_block(other), BY_BLOCK)
    assert not too_far(other, end_to_end(other), END_TO_END)


@pytest.mark.parametrize("shape", ["26b-a4b", "12b", "e2b"])
def test_the_tokens_of_an_image_see_each_other(shape: str):
    seen = case(shape, wrapper=True, batched=True)
    # Two images in the first row, the first of them wider than the window; one at the end of the second.
    kinds = torch.zeros_like(seen.mask)
    kinds[0, 2:11] = kinds[0, 12:] = kinds[1, 9:12] = 1
    images = torch.full_like(kinds, -1)
    images[0, 2:11], images[0, 12:], images[1, 9:12] = 0, 1, 2
    values = seen.model.collect(seen.inputs, list(names(seen.plan)), mm_token_type_ids=kinds)
    found = forward(seen.config, seen.state, seen.inputs["input_ids"], seen.mask, images=images)
    far = {name: difference(name, values[name], value, seen.mask) for name, value in found.items()}
    assert not {name: by for name, by in far.items() if not by <= END_TO_END}
    ahead = found["layers[0].self_attn.attention_probabilities"][0, :, 2, 10]
    assert (ahead > 0).all() == (shape != "e2b")


# ---- what the reference says of itself --------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_is_as_if_it_were_not_there(shape: str):
    padded = case(shape, batched=True)
    together = end_to_end(padded)
    for row, mask in enumerate(padded.mask.bool()):
        single = forward(padded.config, padded.state, padded.inputs["input_ids"][row, mask][None])
        for name, value in single.items():
            rows = [axis for axis in ("seq", "query", "key") if axis in layout(name).axes]
            expected = together[name][row][None]
            for axis in rows:
                expected = expected.index_select(layout(name).axis(axis), mask.nonzero()[:, 0])
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_padding_holds_reaches_no_token(shape: str):
    padded = case(shape, batched=True)
    before, hidden = end_to_end(padded), padded.mask == 0
    changed = padded.inputs["input_ids"].masked_fill(hidden, 77)
    after = forward(padded.config, padded.state, changed, padded.mask)
    for name in before.keys() - {"input_ids"}:
        rows = (on_tokens(name, values[name], padded.mask) for values in (after, before))
        torch.testing.assert_close(*rows, rtol=1e-12, atol=1e-12)
    for name in (n for n in before if n.endswith("attention_probabilities")):
        assert (before[name].sum(-1).transpose(1, 2)[hidden] == 0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_attention_of_a_block_is_the_definitions(shape: str):
    from gemloupe.reference.ops import causal_gqa, sliding_gqa

    one = case(shape)
    values, pos = end_to_end(one), torch.arange(one.mask.shape[1])
    for plan in one.plan.blocks:
        at = f"layers[{plan.index}].self_attn.attention"
        q = values[f"{at}_queries"].transpose(1, 2).unflatten(2, (plan.num_kv_heads, -1))
        k, v = (values[f"{at}_{of}"].transpose(1, 2) for of in ("keys", "values"))
        if plan.window is None:
            heads = causal_gqa(1.0, pos, q, k, v)
        else:
            heads = sliding_gqa(1.0, plan.window, pos, q, k, v)
        torch.testing.assert_close(values[f"{at}_head_outputs"], heads.flatten(2, 3), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_contributions_add_up(shape: str):
    one = case(shape, batched=True)
    values = end_to_end(one)
    for plan in one.plan.blocks:
        of = {
            n.removeprefix(at): v for n, v in values.items() if n.startswith(at := f"layers[{plan.index}].")
        }
        stream = of["layer_input"] + of["self_attn.attention_output"]
        assert torch.equal(stream, of["mid_stream"])
        stream = stream + of["mlp.mlp_output"] + of.get("per_layer_output", 0)
        torch.testing.assert_close(
            stream * one.state[f"model.layers.{plan.index}.layer_scalar"].double(), of["layer_output"]
        )
        if plan.has_experts:
            torch.testing.assert_close(of["mlp.expert_outputs"].sum(2), of["mlp.routed_output"])
            torch.testing.assert_close(
                of["mlp.router_probabilities"].sum(-1), torch.ones(one.mask.shape).double()
            )
        if plan.borrows_keys:
            for kind in ("keys", "values"):
                lent = values[f"layers[{plan.kv_source}].self_attn.own_{kind}"]
                assert torch.equal(of[f"self_attn.attention_{kind}"], lent)


def test_tokens_can_be_sent_to_chosen_experts():
    one = case("26b-a4b")
    stream, where = one.collected["layers[0].layer_input"], sight(one.plan, one.mask)
    own = block(one.weights, 0, stream, where)
    chosen = own["layers[0].mlp.expert_indices"].flip(-1)
    again = block(one.weights, 0, stream, where, given={"layers[0].mlp.expert_indices": chosen})
    weights = (values["layers[0].mlp.expert_weights"] for values in (again, own))
    torch.testing.assert_close(next(weights), next(weights).flip(-1))
    torch.testing.assert_close(again["layers[0].layer_output"], own["layers[0].layer_output"])
    others = (chosen + 1) % 8
    sent = block(one.weights, 0, stream, where, given={"layers[0].mlp.expert_indices": others})
    assert torch.equal(sent["layers[0].mlp.expert_indices"], own["layers[0].mlp.expert_indices"])
    assert torch.equal(sent["layers[0].mlp.router_logits"], own["layers[0].mlp.router_logits"])
    assert not torch.allclose(sent["layers[0].mlp.routed_output"], own["layers[0].mlp.routed_output"])
