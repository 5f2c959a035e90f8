"""The standard names of the values that a forward has, in forward order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..plan import BlockPlan, ModelPlan

__all__ = ["names", "names_of", "place"]

Condition = Callable[[BlockPlan], bool]


def _every(block: BlockPlan) -> bool:
    return True


def _computes_keys(block: BlockPlan) -> bool:
    return not block.borrows_keys


def _has_experts(block: BlockPlan) -> bool:
    return block.has_experts


def _has_per_layer_input(block: BlockPlan) -> bool:
    return block.has_per_layer_input


# {a value's name inside its block: the blocks that have it}
_OF_BLOCK: Final[dict[str, Condition]] = {
    "layer_input": _every,
    "per_layer_input": _has_per_layer_input,
    "self_attn.attention_input": _every,
    "self_attn.own_keys": _computes_keys,
    "self_attn.own_values": _computes_keys,
    "self_attn.attention_queries": _every,
    "self_attn.attention_keys": _every,
    "self_attn.attention_values": _every,
    "self_attn.attention_scores": _every,
    "self_attn.attention_probabilities": _every,
    "self_attn.attention_head_outputs": _every,
    "self_attn.attention_projection": _every,
    "self_attn.attention_output": _every,
    "mid_stream": _every,
    "mlp.mlp_input": _every,
    "mlp.mlp_neurons": _every,
    "mlp.shared_expert_output": _has_experts,
    "mlp.router_logits": _has_experts,
    "mlp.router_probabilities": _has_experts,
    "mlp.expert_indices": _has_experts,
    "mlp.expert_weights": _has_experts,
    "mlp.expert_outputs": _has_experts,
    "mlp.routed_output": _has_experts,
    "mlp.mlp_projection": _every,
    "mlp.mlp_output": _every,
    "per_layer_output": _has_per_layer_input,
    "layer_output": _every,
}
_INPUTS: Final = ("input_ids", "attention_mask", "token_embeddings")
_PER_LAYER_INPUTS: Final = ("per_layer_token_inputs", "per_layer_context_inputs", "per_layer_inputs")
_ANSWERS: Final = ("raw_logits", "logits", "next_token_probs")


def names(plan: ModelPlan) -> tuple[str, ...]:
    """Every value of a text-only forward of `plan`'s model, in forward order."""
    of_blocks = (f"layers[{block.index}].{name}" for block in plan.blocks for name in names_of(block))
    return (*_INPUTS, *(_PER_LAYER_INPUTS if plan.per_layer_input_size else ()), *of_blocks, *_ANSWERS)


def names_of(block: BlockPlan) -> tuple[str, ...]:
    """The values of one block, by their names inside it (`mlp.mlp_output`), in forward order."""
    return tuple(name for name, has_it in _OF_BLOCK.items() if has_it(block))


def place(name: str) -> tuple[int | None, str]:
    """The block of a value, `None` for one of the whole model, and its name there.

    `layers[3].mlp.mlp_output` is block 3's `mlp.mlp_output`.
    """
    block, bracket, inside = name.removeprefix("layers[").partition("].")
    return (int(block), inside) if bracket else (None, name)
