"""The mixture of experts beside a block's dense MLP: where each token is sent, and what comes back.

    probabilities = softmax(proj(rmsnorm_unit(x1) * scale / sqrt(hidden)))
    weight        = probability / sum of the chosen ones' * per_expert_scale
    output        = weight * down(gelu_mul(gate_up(pre_feedforward_layernorm_2(x1))))

Only the `top_k` likeliest experts of each token run, and their outputs are summed.
"""

from __future__ import annotations

import torch

from ..layouts import ExpertIndices, ExpertOutputs, ExpertWeights, Residual
from ..plan import BlockPlan
from .ops import gelu_mul, linear, rmsnorm, rmsnorm_unit, softmax
from .steps import Steps
from .weights import PartWeights

__all__ = ["route"]


def route(steps: Steps, plan: BlockPlan, weights: PartWeights, stream: Residual, eps: float) -> Residual:
    """The experts' answer to the stream after the attention's add, before its post-norm."""
    scaled = rmsnorm_unit(eps, stream) * weights["router.scale"].double() * stream.shape[-1] ** -0.5
    logits = steps("mlp.router_logits", linear(weights["router.proj.weight"], scaled))
    probabilities = steps("mlp.router_probabilities", softmax(logits))
    assert plan.top_k is not None  # a mixture block has one
    likeliest = probabilities.topk(plan.top_k, -1).indices
    indices = steps("mlp.expert_indices", likeliest)
    shares = steps("mlp.expert_weights", _shares(weights, probabilities, indices))
    x = rmsnorm(eps, stream, weights["pre_feedforward_layernorm_2.weight"])
    outputs = steps("mlp.expert_outputs", _expert_outputs(weights, x, indices, shares))
    return steps("mlp.routed_output", outputs.sum(-2))


def _shares(weights: PartWeights, probabilities: torch.Tensor, indices: ExpertIndices) -> ExpertWeights:
    chosen = probabilities.gather(-1, indices)
    return chosen / chosen.sum(-1, keepdim=True) * weights["router.per_expert_scale"].double()[indices]


def _expert_outputs(
    weights: PartWeights, x: Residual, indices: ExpertIndices, shares: ExpertWeights
) -> ExpertOutputs:
    gate_up, down = weights["experts.gate_up_proj"], weights["experts.down_proj"]
    outputs = x.new_zeros(*indices.shape, x.shape[-1])
    # One expert at a time: all of a block's in float64 would be gigabytes.
    for expert in indices.unique().tolist():
        batch, seq, choice = torch.where(indices == expert)
        neurons = gelu_mul(linear(gate_up[expert], x[batch, seq]))
        outputs[batch, seq, choice] = linear(down[expert], neurons) * shares[batch, seq, choice, None]
    return outputs
