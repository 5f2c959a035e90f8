"""Why a value is not there, and what to use instead: the reasons behind every `Unavailable`."""

from __future__ import annotations

from typing import Any

__all__ = ["no_audio", "no_mixture", "no_per_layer_inputs", "no_vision"]


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
        f"Load the published repository, whose config has the towers, or wrap its *ForConditionalGeneration module."
    )
