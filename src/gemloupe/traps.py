"""What surprises people in a Gemma 4 model, as short sentences made from its plan.

Each trap is a function of the plan that answers with its sentence, or with `None` where the model does not
have it. What no plan decides (it is so on every Gemma 4) is in the sentences too, where it is forgotten most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from .plan import BlockPlan, ModelPlan
from .support import spans

__all__ = ["traps"]


def traps(plan: ModelPlan) -> tuple[str, ...]:
    """The traps of a model, one sentence or two each, the widest-reaching first."""
    found = (trap(plan) for trap in _TRAPS)
    return tuple(sentence for sentence in found if sentence is not None)


def _scaled_sum(_plan: ModelPlan) -> str:
    return (
        "`layer_scalar` multiplies the whole sum at the end of a block: `attention_output` and `mlp_output` "
        "are contributions before it, and `layer_output` is not the plain sum of what was added."
    )


def _borrowed_keys(plan: ModelPlan) -> str | None:
    borrowers = [block for block in plan.blocks if block.borrows_keys]
    if not borrowers:
        return None
    sources = " and ".join(
        f"block {source}'s on {kind} ones"
        for kind, source in dict.fromkeys((block.kind, block.kv_source) for block in borrowers)
    )
    return (
        f"{_named(borrowers, 'No keys or values are computed on')}, which attend with {sources}. To change "
        f"those for every borrower, edit the source's `own_keys` or `own_values`; `attention_keys` and "
        f"`attention_values` change one block."
    )


def _sliced_prompt(plan: ModelPlan) -> str | None:
    borrowers = [block for block in plan.blocks if block.borrows_keys]
    if not borrowers:
        return None
    runs = _named(borrowers, "In `generate` transformers, since 5.23, runs")
    return (
        f"{runs} on the last position of the prompt alone, so a plain hook there sees one row of it. A trace "
        f"of `generate` sees every row, unless `full_prefill=False` asks for the fast path."
    )


def _values_from_keys(plan: ModelPlan) -> str | None:
    if not any(block.values_from_keys for block in plan.blocks):
        return None
    return (
        "Full blocks have no `v_proj`: their values are `v_norm(k_proj(x))`, without rotary embedding, so a "
        "change of `k_proj` changes keys and values."
    )


def _head_sizes(plan: ModelPlan) -> str | None:
    sizes = _by_kind(plan)
    said = []
    if len({block.head_dim for block in sizes.values()}) > 1:
        widths = _each({kind: block.head_dim for kind, block in sizes.items()})
        said.append(f"`head_dim` is {widths}, so read it off the block.")
    if len({block.num_kv_heads for block in sizes.values()}) > 1:
        heads = _each({kind: block.num_kv_heads for kind, block in sizes.items()})
        said.append(f"`num_kv_heads` is {heads}.")
    products = {kind: block.num_heads * block.head_dim for kind, block in sizes.items()}
    if any(product != plan.hidden_size for product in products.values()):
        said.append(
            f"The heads together are {_each(products)}, which is not the hidden size, {plan.hidden_size}."
        )
    return " ".join(said) or None


def _double_wide(plan: ModelPlan) -> str | None:
    wide = [block for block in plan.blocks if block.intermediate_size != plan.intermediate_size]
    if not wide:
        return None
    wider = _named(wide, f"The MLP is {wide[0].intermediate_size} wide on")
    return f"{wider} and {plan.intermediate_size} elsewhere: read `intermediate_size` off the block."


def _per_layer_inputs(plan: ModelPlan) -> str | None:
    if plan.per_layer_input_size is None:
        return None
    slots = " An image's slots take the pad token's." if plan.has_vision else ""
    return (
        "A token enters every block once more, through its per-layer embedding: to replace a token, write "
        f"`token_embeddings` and `per_layer_token_inputs`.{slots}"
    )


def _mixture(plan: ModelPlan) -> str | None:
    block = next((block for block in plan.blocks if block.has_experts), None)
    if block is None:
        return None
    return (
        f"Each token goes to {block.top_k} of {block.num_experts} experts and through a dense MLP beside "
        f"them: `mlp_neurons` are the dense MLP's alone, `mlp_output` has both. `router_logits` are before "
        f"the softmax; what transformers calls so are probabilities."
    )


def _capped_logits(plan: ModelPlan) -> str | None:
    if plan.logit_cap is None:
        return None
    cap = f"{plan.logit_cap:g}"
    return (
        f"`logits` are soft-capped, {cap} * tanh(raw / {cap}); `raw_logits` are not. A logit lens needs "
        f"the final norm and the cap: `project_on_vocab` has both."
    )


def _scaled_embeddings(plan: ModelPlan) -> str:
    scale = f"{math.sqrt(plan.hidden_size):.2f}"
    soft = ", what an image puts in their place is not" if plan.has_vision else ""
    return f"`token_embeddings` are scaled by sqrt({plan.hidden_size}) = {scale}{soft}."


def _tied_head(plan: ModelPlan) -> str | None:
    if not plan.tied:
        return None
    return "`lm_head` has the embedding's own weight: a change of one is a change of both."


def _looking_ahead(plan: ModelPlan) -> str | None:
    if plan.bidirectional == "all":
        return "Attention is not causal: every token sees the ones after it."
    if plan.bidirectional is None or not plan.has_vision:
        return None
    # transformers 5.20 to 5.24: Gemma4Model.forward overlays the sliding blocks' mask alone, that of
    # Gemma4UnifiedModel both; its `create_masks_for_generate`, which a static cache asks, does not.
    unified = plan.model_type == "gemma4_unified_text"
    where = "on every block unless `generate` has a static cache" if unified else "on sliding blocks alone"
    return (
        f"The tokens of one image attend to each other in both directions, {where}, if the call is given "
        f"`mm_token_type_ids`, as a trace with images is; without them attention is causal."
    )


def _touching_images(plan: ModelPlan) -> str | None:
    if plan.bidirectional != "vision" or not plan.has_vision:
        return None
    return (
        "Images and frames of video with no token between them are one image to that mask: the first sees "
        "those after it. The processor puts tokens between them; ids made by hand may not."
    )


def _padded_rows(plan: ModelPlan) -> str | None:
    if plan.vision is None:
        return None
    way = "every block of the tower" if plan.vision.blocks else "the embedder"
    return (
        f"The processor pads every image to one number of patches, and the padded rows run through {way} "
        f"like the others: `patch_mask` says which rows are real. `image_features` have none."
    )


def _two_passes(plan: ModelPlan) -> str | None:
    if plan.vision is None:
        return None
    what = "tower" if plan.vision.blocks else "embedder"
    return (
        f"The {what} runs twice in a call with images and video, on the frames last: `patch_embeddings` and "
        f"what follows are the images' then, in an invoke of video alone the frames'."
    )


def _first_step_alone(plan: ModelPlan) -> str | None:
    media = [what for what, there in (("images", plan.vision), ("sound", plan.audio)) if there is not None]
    if not media:
        return None
    return (
        f"In `generate` {' and '.join(media)} are computed in the first step alone, with the prompt: what is "
        f"edited there reaches the later steps through the cached keys and values."
    )


def _unscaled_scores(_plan: ModelPlan) -> str:
    return "Attention scores are not divided by sqrt(head_dim): `q_norm` and `k_norm` decide their size."


def _partly_rotated(plan: ModelPlan) -> str | None:
    for kind, block in _by_kind(plan).items():
        turned = block.rotary.rotated
        if turned != block.head_dim:
            return (
                f"On {kind} blocks {turned} of a head's {block.head_dim} coordinates turn with the position: "
                f"0-{turned // 2 - 1} and {block.head_dim // 2}-{block.head_dim // 2 + turned // 2 - 1}."
            )
    return None


_TRAPS: Final[tuple[Callable[[ModelPlan], str | None], ...]] = (
    _scaled_sum,
    _borrowed_keys,
    _sliced_prompt,
    _values_from_keys,
    _head_sizes,
    _double_wide,
    _per_layer_inputs,
    _mixture,
    _capped_logits,
    _scaled_embeddings,
    _tied_head,
    _looking_ahead,
    _touching_images,
    _padded_rows,
    _two_passes,
    _first_step_alone,
    _unscaled_scores,
    _partly_rotated,
)


def _named(blocks: list[BlockPlan], before: str) -> str:
    """`before`, then the blocks by number."""
    noun = "block" if len(blocks) == 1 else "blocks"
    return f"{before} {noun} {spans(tuple(block.index for block in blocks))}"


def _by_kind(plan: ModelPlan) -> dict[str, BlockPlan]:
    """A block of each kind, which has the attention sizes of all of its kind."""
    first = {block.kind: block for block in reversed(plan.blocks)}
    return {kind: first[kind] for kind in ("sliding", "full") if kind in first}


def _each(sizes: dict[str, int]) -> str:
    """`16 on sliding blocks and 32 on full ones`, or one number where they agree."""
    if len(set(sizes.values())) == 1:
        return str(next(iter(sizes.values())))
    (one, its), (other, theirs) = sizes.items()
    return f"{its} on {one} blocks and {theirs} on {other} ones"
