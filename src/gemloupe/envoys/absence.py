"""Why a value is not there, and what to use instead: the reasons behind every `Unavailable`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = [
    "borrows",
    "keys_are_values",
    "no_audio",
    "no_audio_tower",
    "no_mixture",
    "no_pattern",
    "no_per_layer_inputs",
    "no_tower",
    "no_vision",
]


def no_mixture(host: Any) -> str | None:
    """The block has no mixture of experts."""
    if host.block_plan.has_experts:
        return None
    return (
        f"block {host.block.index} has no mixture of experts, its MLP is dense.\n"
        f"Use mlp_neurons for the MLP's activations and mlp_output for what it adds to the stream."
    )


def no_per_layer_inputs(host: Any) -> str | None:
    """The checkpoint has no per-layer embeddings."""
    if host.model_plan.per_layer_input_size:
        return None
    return (
        "this checkpoint has no per-layer embeddings (E2B and E4B have them).\n"
        "Use token_embeddings for what the tokens put into the stream."
    )


def no_vision(host: Any) -> str | None:
    """The load has no vision tower or embedder."""
    if host.model_plan.has_vision:
        return None
    return _no_modality(host, "images")


def no_audio(host: Any) -> str | None:
    """The load has no audio tower or embedder."""
    if host.model_plan.has_audio:
        return None
    return _no_modality(host, "sound")


def _no_modality(host: Any, what: str) -> str:
    if host.model_plan.wrapper:
        return f"this checkpoint takes no {what}.\nUse token_embeddings for what enters the stream."
    return (
        f"this is the text-only model, which takes no {what}.\n"
        f"Load the published repository, whose config has the towers, with "
        f"task='image-text-to-text', or wrap its *ForConditionalGeneration module."
    )


def no_tower(host: Any) -> str | None:
    """Images go into the stream by an embedder, without a tower."""
    if host.model_plan.vision is None or host.model_plan.vision.blocks:
        return None
    return (
        "this checkpoint (12B) has no vision tower: an embedder takes merged patches to the projector.\n"
        "Use vision.patch_embeddings, vision.tower_output and vision.image_features."
    )


def no_audio_tower(host: Any) -> str | None:
    """Sound goes into the stream as frames of raw samples, without a tower."""
    if host.model_plan.audio is None or host.model_plan.audio.blocks:
        return None
    return (
        "this checkpoint (12B) has no audio tower: frames of raw samples go to the projector.\n"
        "Use audio.tower_output, which are those frames, and audio.audio_features."
    )


def borrows(what: str) -> Callable[[Any], str | None]:
    """The block computes no `what` (keys or values), it borrows another block's."""

    def reason(host: Any) -> str | None:
        plan = host.block_plan
        if not plan.borrows_keys:
            return None
        borrowers = host.model_plan.blocks[plan.kv_source].kv_borrowers
        shown = ", ".join(str(block) for block in borrowers[:5]) + (", ..." if len(borrowers) > 5 else "")
        return (
            f"block {plan.index} computes no {what}, it borrows block {plan.kv_source}'s.\n"
            f"Edit layers[{plan.kv_source}].self_attn.own_{what} to change every borrower ({shown}),\n"
            f"or layers[{plan.index}].self_attn.attention_{what} to change block {plan.index} alone."
        )

    return reason


def keys_are_values(host: Any) -> str | None:
    """The block has no projection for its values."""
    borrowed = borrows("values")(host)
    if borrowed is not None or not host.block_plan.values_from_keys:
        return borrowed
    return (
        f"block {host.block_plan.index} has no v_proj: its values are its keys' projection, "
        f"`v_norm(k_proj(x))`.\nUse own_values for its values."
    )


def no_pattern(host: Any) -> str | None:
    """The attention implementation does not say what it masks."""
    implementation = host._module.config._attn_implementation
    if implementation in ("eager", "sdpa", "flex_attention"):
        return None
    return (
        f"{implementation} keeps neither scores nor pattern, and its mask cannot be read.\n"
        f"Load with attn_implementation='sdpa', or use attention_queries, attention_keys and "
        f"attention_head_outputs, which it has."
    )
