"""The vision tower of a `gemma4` wrapper: from the patches of images to what replaces their tokens.

    patch_embeddings = input_proj(2 * pixels - 1)
    stream           = patch_embeddings + table[0][x] + table[1][y]       # of a padded row nothing is added
    x1               = stream + post_attention_layernorm(self_attn(input_layernorm(stream)))
    stream           = x1 + post_feedforward_layernorm(mlp(pre_feedforward_layernorm(x1))), for each block
    soft token       = sqrt(hidden) * mean of a square of patches; (that - std_bias) * std_scale
    feature          = projection(soft token / rms)

Every patch sees all real patches of its image, ahead and behind. Padded rows (places of -1) run through every
block, are seen by none, and leave no soft token. Linear maps may be clipped. Frames of a video are images.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import BadArgument
from ..layouts import Keys, Patches, PatchMask, PooledPatches
from .attention import mix
from .ops import gelu_tanh, linear, residual, rmsnorm, rmsnorm_unit, rope_std
from .steps import SINGLE, Given, Steps, taken
from .tower_ops import check_patches, clipped_linear, project
from .towers import VisionTower
from .weights import PartWeights, Weights

__all__ = ["pooled", "real_patches", "vision_block", "vision_entrance", "vision_parts"]

Pixels = Float[Tensor, "images patches numbers"]
Places = Int[Tensor, "images patches 2"]
ByHead = Float[Tensor, "images patches heads head_dim"]


def vision_parts(
    weights: Weights, pixels: Pixels, places: Places, *, features: str, given: Given | None = None
) -> Iterator[dict[str, Tensor]]:
    """Every value of the tower's pass over some images, by standard name: the entrance, each block, the exit.

    pixels: from 0 to 1. places: each patch's column and row, -1 and -1 on a padded one.
    features: the name of what replaces the tokens, `image_features` or `video_features`.
    given: see `block`.
    """
    found = vision_entrance(weights, pixels, places, given=given)
    stream = taken(given, "vision.patch_embeddings", found["vision.patch_embeddings"])
    stream = weights.real(stream) + _place_embeddings(weights, places)
    yield found
    for index in range(_plan(weights).num_layers):
        found = vision_block(weights, index, stream, places, given=given)
        name = f"vision.layers[{index}].layer_output"
        stream = weights.real(taken(given, name, found[name]))
        handed = [found]  # who waits for the next piece is not to hold this one
        del found
        yield handed.pop()
    yield pooled(weights, stream, places, features=features, given=given)


def real_patches(places: Places) -> PatchMask:
    """Whether each row is a patch, and no padding."""
    return ~places.eq(-1).all(-1)


def vision_entrance(
    weights: Weights, pixels: Pixels, places: Places, *, given: Given | None = None
) -> dict[str, Tensor]:
    """What the patches are before the first block, by name."""
    plan, steps = _plan(weights), Steps("vision.", given, weights.real)
    _check(plan, pixels, places)
    steps("patch_mask", real_patches(places.to(weights.device)))
    pixels = steps.between(2 * steps.between(weights.real(pixels)) - 1)
    steps("patch_embeddings", linear(weights["model.vision_tower.patch_embedder.input_proj.weight"], pixels))
    return steps.found


def vision_block(
    weights: Weights, index: int, stream: Patches, places: Places, *, given: Given | None = None
) -> dict[str, Tensor]:
    """Every value of the tower's block `index`, by its standard name, in forward order; see `block`."""
    plan = _plan(weights)
    of_block = weights.under(f"model.vision_tower.encoder.layers.{index}.")
    steps = Steps(f"vision.layers[{index}].", given, weights.real)
    places = places.to(weights.device)

    def normed(name: str, x: Patches) -> Patches:
        return rmsnorm(plan.norm_eps, x, of_block[f"{name}.weight"])

    stream = steps("layer_input", weights.real(stream))
    x = steps("self_attn.attention_input", normed("input_layernorm", stream))
    projection = steps("self_attn.attention_projection", _attend(steps, plan, of_block, x, places))
    added = steps("self_attn.attention_output", normed("post_attention_layernorm", projection))
    stream = steps("mid_stream", residual(1, stream, added))

    x = steps("mlp.mlp_input", normed("pre_feedforward_layernorm", stream))
    gate, up = (clipped_linear(of_block, f"mlp.{of}_proj", x, clipped=plan.clipped) for of in ("gate", "up"))
    neurons = steps("mlp.mlp_neurons", gelu_tanh(gate) * up)
    projection = clipped_linear(of_block, "mlp.down_proj", neurons, clipped=plan.clipped)
    projection = steps("mlp.mlp_projection", projection)
    added = steps("mlp.mlp_output", normed("post_feedforward_layernorm", projection))
    steps("layer_output", residual(1, stream, added))
    return steps.found


def pooled(
    weights: Weights, stream: Patches, places: Places, *, features: str, given: Given | None = None
) -> dict[str, Tensor]:
    """What the tower's last stream becomes, by name: the soft tokens of all images in a row, their features.

    Source: `Gemma4VisionPooler` and the end of `Gemma4VisionModel.forward`.
    """
    plan, steps = _plan(weights), Steps("", given, weights.real)
    stream = steps("vision.tower_output", weights.real(stream))
    soft = steps.between(_means(stream, places.to(weights.device), plan.pooling)) * plan.hidden_size**0.5
    if plan.standardized:
        bias, scale = (weights[f"model.vision_tower.std_{of}"].double() for of in ("bias", "scale"))
        soft = (soft - bias) * scale
    soft = steps("projector.soft_tokens", soft)
    steps(f"vision.{features}", project(weights.under("model.embed_vision."), plan.norm_eps, soft))
    return steps.found


# ---- the steps --------------------------------------------------------------------------------------------


def _place_embeddings(weights: Weights, places: Places) -> Patches:
    """What is added to each patch for its column and for its row."""
    places = places.to(weights.device)
    columns, rows = weights["model.vision_tower.patch_embedder.position_embedding_table"]
    known = places.clamp(min=0)
    added = columns[known[..., 0]].double() + rows[known[..., 1]].double()
    return added * real_patches(places)[..., None]


def _attend(steps: Steps, plan: VisionTower, weights: PartWeights, x: Patches, places: Places) -> Patches:
    """`o_proj`'s output."""

    def heads(of: str) -> ByHead:
        projected = clipped_linear(weights, f"self_attn.{of}_proj", x, clipped=plan.clipped)
        return projected.unflatten(-1, (-1, plan.head_dim))

    def turned(of: str) -> Keys:
        normed = rmsnorm(plan.norm_eps, heads(of), weights[f"self_attn.{of}_norm.weight"])
        return _turned(steps, plan, normed, places).transpose(1, 2)

    keys = steps("self_attn.own_keys", turned("k"))
    values = steps("self_attn.own_values", rmsnorm_unit(plan.norm_eps, heads("v")).transpose(1, 2))
    mixed = mix(steps, turned("q"), keys, values, _visible(places))
    return clipped_linear(weights, "self_attn.o_proj", mixed.flatten(2), clipped=plan.clipped)


def _turned(steps: Steps, plan: VisionTower, heads: ByHead, places: Places) -> ByHead:
    """The rotary embedding: the first half of a head turns with the column, the second with the row.

    Source: `Gemma4VisionRotaryEmbedding` and `apply_multidimensional_rope`.
    """
    halves = heads.chunk(2, -1)
    place = steps.between(places.double(), SINGLE)
    width = plan.head_dim // 2
    return torch.cat(
        [rope_std(plan.theta, width, place[..., axis, None], half) for axis, half in enumerate(halves)], -1
    )


def _visible(places: Places) -> Bool[Tensor, "images query key"]:
    real = real_patches(places)
    return real[:, None].expand(-1, real.shape[1], -1)


def _means(stream: Patches, places: Places, pooling: int) -> PooledPatches:
    """The mean of each square of `pooling` by `pooling` patches, the squares of an image row by row."""
    means = []
    for patches, place, real in zip(stream, places, real_patches(places), strict=True):
        square, patches = place[real] // pooling, patches[real]
        columns = (place[real, 0].amax() + 1) // pooling
        index = square[:, 0] + columns * square[:, 1]
        sums = patches.new_zeros(int(index.max()) + 1, patches.shape[-1]).index_add(0, index, patches)
        means.append(sums[index.bincount() > 0] / pooling**2)
    return torch.cat(means)


def _plan(weights: Weights) -> VisionTower:
    plan = None if weights.towers is None else weights.towers.vision
    if not isinstance(plan, VisionTower):
        raise BadArgument(
            "these weights have no vision tower; pass a gemma4 wrapper's config and state_dict()."
        )
    return plan


def _check(plan: VisionTower, pixels: Tensor, places: Tensor) -> None:
    check_patches(pixels, places, patch_size=plan.patch_size, table_size=plan.table_size)
    if pixels.shape[1] % plan.pooling**2:
        raise BadArgument(
            f"{pixels.shape[1]} rows of patches do not pool into squares of {plan.pooling} by {plan.pooling}."
        )
    if not bool(real_patches(places).any(-1).all()):
        raise BadArgument("an image is all padding: none of its rows is a patch.")
