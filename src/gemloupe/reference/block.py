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
from ..layouts import ExpertIndices, Keys, PerLayerInput, Residual
from ..plan import BlockPlan
from .attention import attend
from .cache import Cache
from .mixture import route
from .ops import gate_up, gelu_mul, gelu_tanh, linear, residual, rmsnorm
from .sight import Sight
from .weights import BlockWeights, Weights

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
    expert_indices: ExpertIndices | None = None,
) -> dict[str, Tensor]:
    """Every value of block `index`, by its standard name (`layers[3].mlp.mlp_output`), in forward order.

        found = block(weights, 3, stream, sight(weights.plan, attention_mask))

    The block is run alone, on a stream of any precision, and its weights are the only ones read. Values
    are float64, `expert_indices` int64, on the device of `weights`, where `sight` is to be too.

    per_layer_input: this block's slice of `per_layer_inputs`, on a checkpoint that has them.
    borrowed: `attention_keys` and `attention_values` of the block that this one borrows from.
    cache: the tokens before these, to which this block's keys and values are appended.
    expert_indices: send the tokens to these experts instead of the likeliest ones. Where two experts are
        nearly as likely, a model in low precision may choose the other; its own choice can be given here.

    Raises: BadArgument, if the block needs `per_layer_input` or `borrowed` and has none.
    """
    plan = weights.plan.blocks[index]
    _check_given(plan, per_layer_input, borrowed)
    of_block, eps = weights.of_block(index), weights.plan.norm_eps
    stream = weights.real(stream)

    def normed(name: str, x: Residual) -> Residual:
        return rmsnorm(eps, x, of_block[f"{name}.weight"])

    found = {"layer_input": stream}
    if per_layer_input is not None:
        found["per_layer_input"] = weights.real(per_layer_input)

    attention = {"attention_input": normed("input_layernorm", stream)}
    if borrowed is not None:
        borrowed = weights.real(borrowed[0]), weights.real(borrowed[1])
    attention |= attend(plan, of_block, attention["attention_input"], sight, eps, borrowed, cache)
    attention["attention_output"] = normed("post_attention_layernorm", attention["attention_projection"])
    found |= _under("self_attn", attention)
    found["mid_stream"] = middle = residual(1, stream, attention["attention_output"])

    mlp = _dense(of_block, normed("pre_feedforward_layernorm", middle))
    if plan.has_experts:
        # What is all of a dense block's MLP is one branch of two.
        mlp["shared_expert_output"] = shared = mlp.pop("mlp_projection")
        indices = None if expert_indices is None else expert_indices.to(weights.device)
        mlp |= route(plan, of_block, middle, eps, indices)
        dense = normed("post_feedforward_layernorm_1", shared)
        mlp["mlp_projection"] = dense + normed("post_feedforward_layernorm_2", mlp["routed_output"])
    mlp["mlp_output"] = normed("post_feedforward_layernorm", mlp["mlp_projection"])
    found |= _under("mlp", mlp)
    out = residual(1, middle, mlp["mlp_output"])

    if per_layer_input is not None:
        projected = _per_layer(of_block, out, found["per_layer_input"])
        found["per_layer_output"] = normed("post_per_layer_input_norm", projected)
        out = residual(1, out, found["per_layer_output"])
    found["layer_output"] = out * of_block["layer_scalar"].double()
    return _under(f"layers[{index}]", found)


def _under(host: str, found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{host}.{name}": value for name, value in found.items()}


def _dense(weights: BlockWeights, x: Residual) -> dict[str, Tensor]:
    both = gate_up(weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"], x)
    neurons = gelu_mul(both)
    projection = linear(weights["mlp.down_proj.weight"], neurons)
    return {"mlp_input": x, "mlp_neurons": neurons, "mlp_projection": projection}


def _per_layer(weights: BlockWeights, x: Residual, given: PerLayerInput) -> Residual:
    gate = gelu_tanh(linear(weights["per_layer_input_gate.weight"], x))
    return linear(weights["per_layer_projection.weight"], gate * given)


def _check_given(plan: BlockPlan, per_layer_input: Tensor | None, borrowed: object) -> None:
    if plan.has_per_layer_input != (per_layer_input is not None):
        has = "needs" if plan.has_per_layer_input else "takes no"
        raise BadArgument(f"block {plan.index} {has} per_layer_input.")
    if plan.borrows_keys and borrowed is None:
        raise BadArgument(
            f"block {plan.index} computes no keys, it borrows block {plan.kv_source}'s: "
            f"pass borrowed=(attention_keys, attention_values) of that block."
        )
    if not plan.borrows_keys and borrowed is not None:
        raise BadArgument(f"block {plan.index} computes its own keys and values, and borrows none.")
