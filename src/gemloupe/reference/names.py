"""The standard names of the values that a forward has, in forward order."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from ..plan import BlockPlan, ModelPlan
from .towers import AudioTower, Towers, VisionTower

__all__ = ["names", "names_of", "pieces", "place"]

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
_PLACE: Final = re.compile(r"((?:vision|audio)\.)?layers\[(\d+)\]\.(.*)")
_INPUTS: Final = ("input_ids", "attention_mask")
_BY_TOKEN: Final = ("token_embeddings", "per_layer_token_inputs")
_BY_CONTEXT: Final = ("per_layer_context_inputs", "per_layer_inputs")
_ANSWERS: Final = ("raw_logits", "logits", "next_token_probs")

# {a medium: the host of what is scattered, and the name of its tokens' mask there}
_TOKEN_MASKS: Final = {
    "image": ("vision", "image_token_mask"),
    "video": ("vision", "video_token_mask"),
    "audio": ("audio", "audio_token_mask"),
}
_PATCHES: Final = ("vision.patch_mask", "vision.patch_embeddings")
_FRAMES: Final = ("audio.frame_embeddings",)
_SOUND: Final = (
    "audio.tower_output",
    "audio_projector.soft_tokens",
    "audio.frame_mask",
    "audio.audio_features",
)
_RAW_SOUND: Final = ("audio.tower_output", "audio.frame_mask", "audio.audio_features")
# A vision block has all that a text block has that computes its keys, has no experts and no per-layer input.
_OF_VISION_BLOCK: Final = tuple(
    name for name, has_it in _OF_BLOCK.items() if has_it in (_every, _computes_keys)
)
_OF_AUDIO_BLOCK: Final = (
    "layer_input",
    "feed_forward1.mlp_output",
    "self_attn.attention_output",
    "lconv1d.convolution_output",
    "feed_forward2.mlp_output",
    "layer_output",
)


def names(
    plan: ModelPlan, towers: Towers | None = None, media: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """Every value of a forward of `plan`'s model, in forward order.

    towers, media: what the wrapper has, and which of `image`, `video`, `audio` the forward is given, if any.
    """
    return tuple(dict.fromkeys(name for piece in pieces(plan, towers, media) for name in piece))


def pieces(
    plan: ModelPlan, towers: Towers | None = None, media: frozenset[str] = frozenset()
) -> tuple[tuple[str, ...], ...]:
    """The same, in the pieces in which `parts` yields the values.

    Where a forward has images and frames of video the tower runs once for each, and its names come twice.
    """
    by_token = _BY_TOKEN if plan.per_layer_input_size else _BY_TOKEN[:1]
    by_context = _BY_CONTEXT if plan.per_layer_input_size else ()
    blocks = (_in("", block.index, names_of(block)) for block in plan.blocks)
    if towers is None or not media:
        return (_INPUTS, by_token + by_context, *blocks, _ANSWERS)
    hosts = {"vision": towers.vision, "audio": towers.audio}
    masks = (f"{host}.{name}" for host, name in _TOKEN_MASKS.values() if hosts[host] is not None)
    of_media = (piece for kind in _TOKEN_MASKS if kind in media for piece in _of_medium(towers, kind))
    context = (by_context,) if by_context else ()
    return ((*_INPUTS, *masks), by_token, *of_media, *context, *blocks, _ANSWERS)


def _of_medium(towers: Towers, kind: str) -> list[tuple[str, ...]]:
    if kind == "audio" and isinstance(towers.audio, AudioTower):
        blocks = [_in("audio.", i, _OF_AUDIO_BLOCK) for i in range(towers.audio.num_layers)]
        return [_FRAMES, *blocks, _SOUND]
    if kind == "audio":
        return [_RAW_SOUND]
    output, features = "vision.tower_output", f"vision.{kind}_features"
    if isinstance(towers.vision, VisionTower):
        blocks = [_in("vision.", i, _OF_VISION_BLOCK) for i in range(towers.vision.num_layers)]
        return [_PATCHES, *blocks, (output, "projector.soft_tokens", features)]
    return [(*_PATCHES, output, features)]


def _in(host: str, index: int, inside: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{host}layers[{index}].{name}" for name in inside)


def names_of(block: BlockPlan) -> tuple[str, ...]:
    """The values of one block, by their names inside it (`mlp.mlp_output`), in forward order."""
    return tuple(name for name, has_it in _OF_BLOCK.items() if has_it(block))


def place(name: str) -> tuple[int | None, str]:
    """The block of a value, `None` for one that is of no block, and its name there.

    `layers[3].mlp.mlp_output` is block 3's `mlp.mlp_output`, and `vision.layers[3].mlp.mlp_output` is the
    vision tower's block 3's `vision.mlp.mlp_output`.
    """
    match = _PLACE.fullmatch(name)
    return (None, name) if match is None else (int(match[2]), f"{match[1] or ''}{match[3]}")
