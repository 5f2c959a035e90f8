"""One block of a Gemma 4 text model, from the stream that enters it.

    x1  = x  + post_attention_layernorm(self_attn(input_layernorm(x)))
    x2  = x1 + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(x1)))
    x3  = x2 + post_per_layer_input_norm(per_layer_projection(gelu(per_layer_input_gate(x2)) * given))
    out = x3 * layer_scalar

On a mixture block `post_feedforward_layernorm` receives the sum of the dense MLP's output and of the
experts', each through a norm of its own. Every norm is `rmsnorm`.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import BadArgument
from ..layouts import Keys, PerLayerInput, Residual
from ..plan import BlockPlan
from .attention import attend
from .cache import Cache
from .mixture import route
from .ops import gate_up, gelu_mul, gelu_tanh, linear, residual, rmsnorm
from .sight import Sight
from .steps import SINGLE, Given, Steps
from .weights import PartWeights, Weights

__all__ = ["block"]


def block(
    weights: Weights,
    index: int,
    stream: Residual,
    sight: Sight,
    *,
    per_layer_input: PerLayerInput | None = None,
    borrowed: tuple[Keys, Keys] | None = None,
    cache: Cache | None = None,
    given: Given | None = None,
) -> dict[str, Tensor]:
    """Every value of block `index`, by its standard name (`layers[3].mlp.mlp_output`), in forward order.

        found = block(weights, 3, stream, sight(weights.plan, attention_mask))

    The block is run alone, on a stream of any precision, and its weights are the only ones read. Values
    are float64, `expert_indices` int64, on the device of `weights`, where `sight` is to be too.

    per_layer_input: this block's slice of `per_layer_inputs`, on a checkpoint that has them.
    borrowed: the keys and values of the block that this one borrows from, every token's.
    cache: the tokens before these, to which this block's keys and values are appended.
    given: values by standard name that take the place of this block's own in all that follows from them, or
        a function of a name and the computed value; what is returned under their names is what the block
        computes. Given every value that a model
        serves, each is computed from the model's own a step before.

    Raises: BadArgument, if the block needs `per_layer_input` or `borrowed` and has none.
    """
    plan = weights.plan.blocks[index]
    _check_given(plan, per_layer_input, borrowed)
    of_block, eps = weights.of_block(index), weights.plan.norm_eps
    steps = Steps(f"layers[{index}].", given, weights.real)

    def normed(name: str, x: Residual) -> Residual:
        return rmsnorm(eps, x, of_block[f"{name}.weight"])

    stream = steps("layer_input", weights.real(stream))
    if per_layer_input is not None:
        per_layer_input = steps("per_layer_input", weights.real(per_layer_input))
    if borrowed is not None:
        borrowed = weights.real(borrowed[0]), weights.real(borrowed[1])

    x = steps("self_attn.attention_input", normed("input_layernorm", stream))
    projection = attend(steps, plan, of_block, x, sight, eps, borrowed, cache)
    added = steps("self_attn.attention_output", normed("post_attention_layernorm", projection))
    stream = steps("mid_stream", residual(1, stream, added))

    x = steps("mlp.mlp_input", normed("pre_feedforward_layernorm", stream))
    projection = _dense(steps, of_block, x)
    if plan.has_experts:
        shared = steps("mlp.shared_expert_output", projection)
        routed = route(steps, plan, of_block, stream, eps)
        projection = normed("post_feedforward_layernorm_1", shared)
        projection = projection + normed("post_feedforward_layernorm_2", routed)
    projection = steps("mlp.mlp_projection", projection)
    added = steps("mlp.mlp_output", normed("post_feedforward_layernorm", projection))
    stream = residual(1, stream, added)

    if per_layer_input is not None:
        projection = _per_layer(steps, of_block, steps.between(stream), per_layer_input)
        added = steps("per_layer_output", normed("post_per_layer_input_norm", projection))
        stream = residual(1, stream, added)
    steps("layer_output", stream * of_block["layer_scalar"].double())
    return steps.found


def _dense(steps: Steps, weights: PartWeights, x: Residual) -> Residual:
    both = gate_up(weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"], x)
    neurons = steps("mlp.mlp_neurons", gelu_mul(both))
    return linear(weights["mlp.down_proj.weight"], neurons)


def _per_layer(steps: Steps, weights: PartWeights, x: Residual, given: PerLayerInput) -> Residual:
    # For a token whose gates are shut next to nothing is left, which the norm then makes as large as any:
    # what rounding does between these is not small, so they are told.
    gate = steps.between(linear(weights["per_layer_input_gate.weight"], x))
    # Of a gate far below zero the tanh is next to -1: in float32 the sum of 1 and it has lost its digits, and
    # what is lost is a rounding of the gate itself.
    lost = steps.between(gate, SINGLE) - gate
    gated = steps.between(steps.between(gelu_tanh(gate) + lost) * given)
    return steps.between(linear(weights["per_layer_projection.weight"], gated))


def _check_given(plan: BlockPlan, per_layer_input: Tensor | None, borrowed: object) -> None:
    if plan.has_per_layer_input != (per_layer_input is not None):
        has = "needs" if plan.has_per_layer_input else "takes no"
        raise BadArgument(f"block {plan.index} {has} per_layer_input.")
    if plan.borrows_keys and borrowed is None:
        raise BadArgument(
            f"block {plan.index} computes no keys, it borrows block {plan.kv_source}'s: "
            f"pass borrowed=(keys, values), those of that block's every token."
        )
    if not plan.borrows_keys and borrowed is not None:
        raise BadArgument(f"block {plan.index} computes its own keys and values, and borrows none.")
