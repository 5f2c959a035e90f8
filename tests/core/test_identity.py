"""Rule 1: contributions add up to the stream, bit for bit in the model's own order of additions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.models import Case, every_case
from tests.core.places import Place, reading

every_case_once = pytest.mark.parametrize("case", every_case(), ids=str)
every_mixture = pytest.mark.parametrize("case", every_case(shapes=("26b-a4b",)), ids=str)


def blocks(case: Case) -> list[Any]:
    module = case.bare().model
    return list(getattr(module, "language_model", module).layers)


def native_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32 whatever the dtype, as the model does it."""
    wide = x.float()
    return (wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + eps, -0.5) * weight.float()).to(x.dtype)


@every_case_once
def test_contributions_add_up_to_the_stream(case):
    for values in reading(case):
        for i, block in enumerate(blocks(case)):

            def of(name: str, part: str = "", i: int = i, values: dict[Place, Tensor] = values) -> Tensor:
                return values[Place(name, i, part)].detach()

            assert torch.equal(of("layer_input") + of("attention_output", "self_attn"), of("mid_stream")), i
            stream = of("mid_stream") + of("mlp_output", "mlp")
            if Place("per_layer_output", i) in values:
                stream = stream + of("per_layer_output")
            assert torch.equal(stream * block.layer_scalar, of("layer_output")), i


@pytest.mark.parametrize("case", every_case(dtypes=(torch.float32,), wrapper=(False,)), ids=str)
def test_the_design_s_order_of_additions_holds_to_rounding(case):
    """`(x + attention + mlp [+ per_layer]) * scalar`, within a few roundings of the largest number."""
    for values in reading(case):
        for i, block in enumerate(blocks(case)):
            terms = [("layer_input", ""), ("attention_output", "self_attn"), ("mlp_output", "mlp")]
            if Place("per_layer_output", i) in values:
                terms.append(("per_layer_output", ""))
            total = sum(values[Place(name, i, part)].detach().double() for name, part in terms)
            out = values[Place("layer_output", i)].detach()
            difference = (total * block.layer_scalar.double() - out).abs().max()
            assert difference <= 4 * torch.finfo(torch.float32).eps * out.abs().max(), i


@pytest.mark.parametrize("case", every_case(dtypes=(torch.float32,), batched=(False,)), ids=str)
def test_the_model_s_layer_scalar_is_not_one(case):
    """Lest the identity above hold for a scale that is never applied; in bfloat16 one may round to it."""
    model = case.model()
    for i, block in enumerate(blocks(case)):
        assert (block.layer_scalar != 1).all()
        assert torch.equal(model.layers[i].layer_scalar, block.layer_scalar)


@every_case_once
def test_the_streams_of_neighbours_are_one(case):
    for values in reading(case):
        count = len(blocks(case))
        assert torch.equal(values[Place("token_embeddings")], values[Place("layer_input", 0)])
        for i in range(1, count):
            assert torch.equal(values[Place("layer_output", i - 1)], values[Place("layer_input", i)])


@every_mixture
def test_routed_output_is_the_sum_of_the_experts(case):
    for values in reading(case):
        for i in range(len(blocks(case))):
            outputs = values[Place("expert_outputs", i, "mlp")].detach()
            routed = values[Place("routed_output", i, "mlp")].detach()
            total = outputs.sum(2).to(routed.dtype)
            if case.experts == "eager":  # adds in the order of the experts' numbers, rounding each time
                allowed = 4 * torch.finfo(routed.dtype).eps * routed.abs().max()
                assert (total - routed).abs().max() <= allowed, i
            else:
                assert torch.equal(total, routed), i


@every_mixture
def test_mixture_s_mlp_output_is_made_of_its_two_branches(case):
    for values in reading(case):
        for i, block in enumerate(blocks(case)):
            eps = block.post_feedforward_layernorm.eps
            shared = values[Place("shared_expert_output", i, "mlp")].detach()
            routed = values[Place("routed_output", i, "mlp")].detach()
            dense = native_norm(shared, block.post_feedforward_layernorm_1.weight, eps)
            mixed = native_norm(routed, block.post_feedforward_layernorm_2.weight, eps)
            assert torch.equal(dense + mixed, values[Place("mlp_projection", i, "mlp")].detach()), i
            output = native_norm(dense + mixed, block.post_feedforward_layernorm.weight, eps)
            assert torch.equal(output, values[Place("mlp_output", i, "mlp")].detach()), i


@every_mixture
def test_routing_values_agree_with_one_another(case):
    for values in reading(case):
        for i, block in enumerate(blocks(case)):
            logits, probabilities, weights, indices = (
                values[Place(name, i, "mlp")].detach()
                for name in ("router_logits", "router_probabilities", "expert_weights", "expert_indices")
            )
            assert torch.equal(logits.softmax(-1, dtype=torch.float32), probabilities), i
            top, chosen = probabilities.topk(indices.shape[-1], -1)
            assert torch.equal(chosen, indices), i
            scaled = top / top.sum(-1, keepdim=True) * block.router.per_expert_scale[indices]
            assert torch.equal(scaled, weights), i
