"""The audio tower of a `gemma4` wrapper: from the mel bins of sounds to what replaces their tokens.

    frame_embeddings = input_proj(two convolutions, each of which halves the frames and the bins)
    x1               = stream + weight * feed_forward1(stream)
    x2               = x1 + norm_post_attn(self_attn(norm_pre_attn(x1)))
    x3               = x2 + lconv1d(x2)
    stream           = norm_out(x3 + weight * feed_forward2(x3)), for each block
    soft token       = output_proj(stream)
    feature          = projection(soft token / rms)

A Conformer (Gulati et al., 2020) whose attention sees a few frames back, with an embedding of each distance.
Padded frames are seen by none, and leave no feature. What is computed from a padded frame is defined too, and
computed here as the model does. Source: `Gemma4AudioModel` and what it builds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import conv1d, conv2d, pad

from ..errors import BadArgument
from ..layouts import FrameMask, Frames
from .ops import linear, residual, rmsnorm, silu, softcap, softmax
from .steps import Given, Steps, taken
from .tower_ops import DEFAULT_EPS, clipped_linear, glu, layer_norm, limited, project, sinusoids, softplus
from .towers import AudioTower
from .weights import PartWeights, Weights

__all__ = ["audio_block", "audio_entrance", "audio_exit", "audio_parts", "halved_mask"]

MelFrames = Float[Tensor, "audios frames bins"]


def audio_parts(
    weights: Weights, sounds: MelFrames, real: FrameMask, *, given: Given | None = None
) -> Iterator[dict[str, Tensor]]:
    """Every value of the tower's pass over some sounds, by standard name: the entrance, each block, the exit.

    real: which frames of each sound are no padding; every fourth of them says it of a frame of the tower's.
    given: see `block`.
    """
    found = audio_entrance(weights, sounds, real, given=given)
    real = halved_mask(halved_mask(real))
    stream = weights.real(taken(given, "audio.frame_embeddings", found["audio.frame_embeddings"]))
    yield found
    for index in range(_plan(weights).num_layers):
        found = audio_block(weights, index, stream, real, given=given)
        name = f"audio.layers[{index}].layer_output"
        stream = weights.real(taken(given, name, found[name]))
        handed = [found]  # who waits for the next piece is not to hold this one
        del found
        yield handed.pop()
    yield audio_exit(weights, stream, real, given=given)


def halved_mask(real: FrameMask) -> FrameMask:
    """Which frames are real after a convolution: those of which the middle one was."""
    return real[:, ::2].bool()


def audio_entrance(
    weights: Weights, sounds: MelFrames, real: FrameMask, *, given: Given | None = None
) -> dict[str, Tensor]:
    """What the sounds are before the first block, by name: one frame where there were four."""
    steps = Steps("audio.", given, weights.real)
    _check(weights, sounds, real)
    x, real = steps.between(weights.real(sounds))[:, None], real.to(weights.device).bool()
    path = "model.audio_tower.subsample_conv_projection."
    for index in range(2):
        x = _halved(steps, weights.under(f"{path}layer{index}."), _plan(weights).norm_eps, x, real)
        real = halved_mask(real)
    # Of a frame all channels of its first bin come first, then those of the next.
    x = x.permute(0, 2, 3, 1).flatten(2)
    steps("frame_embeddings", linear(weights[f"{path}input_proj_linear.weight"], x))
    return steps.found


def audio_block(
    weights: Weights, index: int, stream: Frames, real: FrameMask, *, given: Given | None = None
) -> dict[str, Tensor]:
    """Every value of the tower's block `index`, by its standard name, in forward order; see `block`."""
    plan, of_block = _plan(weights), weights.under(f"model.audio_tower.layers.{index}.")
    steps = Steps(f"audio.layers[{index}].", given, weights.real)
    dtype = of_block["norm_pre_attn.weight"].dtype

    def clipped_normed(name: str, x: Frames) -> Frames:
        x = limited(x, plan.clipping, dtype)
        return steps.between(rmsnorm(DEFAULT_EPS, x, of_block[f"{name}.weight"]))

    stream = steps("layer_input", weights.real(stream))
    added = steps("feed_forward1.mlp_output", _feed_forward(steps, plan, of_block, "feed_forward1", stream))
    stream = steps.between(residual(1, stream, added))

    x = clipped_normed("norm_pre_attn", stream)
    x = _attend(steps, plan, of_block, x, real.to(weights.device))
    x = rmsnorm(DEFAULT_EPS, limited(x, plan.clipping, dtype), of_block["norm_post_attn.weight"])
    added = steps("self_attn.attention_output", x)
    stream = steps.between(residual(1, stream, added))

    added = steps("lconv1d.convolution_output", _convolve(steps, plan, of_block, stream))
    stream = steps.between(residual(1, stream, added))

    added = steps("feed_forward2.mlp_output", _feed_forward(steps, plan, of_block, "feed_forward2", stream))
    stream = steps.between(residual(1, stream, added))
    stream = limited(stream, plan.clipping, dtype)
    steps("layer_output", rmsnorm(DEFAULT_EPS, stream, of_block["norm_out.weight"]))
    return steps.found


def audio_exit(
    weights: Weights, stream: Frames, real: FrameMask, *, given: Given | None = None
) -> dict[str, Tensor]:
    """What the tower's last stream becomes, by name: the soft tokens, and the features of the real ones."""
    plan, steps = _plan(weights), Steps("", given, weights.real)
    stream = steps("audio.tower_output", weights.real(stream))
    tower, real = weights.under("model.audio_tower.output_proj."), real.to(weights.device).bool()
    soft = steps("audio_projector.soft_tokens", linear(tower["weight"], stream) + tower["bias"].double())
    steps("audio.frame_mask", real)
    features = project(weights.under("model.embed_audio."), plan.norm_eps, soft)
    steps("audio.audio_features", features[real])
    return steps.found


# ---- the steps --------------------------------------------------------------------------------------------


def _halved(
    steps: Steps, weights: PartWeights, eps: float, x: Tensor, real: FrameMask
) -> Float[Tensor, "audios channels frames bins"]:
    """A convolution over 3 frames and 3 bins about every other one, its channels normed and rectified."""
    x = conv2d(x * real[:, None, :, None], weights["conv.weight"].double(), stride=2, padding=1)
    x = steps.between(x.movedim(1, -1))
    x = steps.between(layer_norm(eps, x, weights["norm.weight"]).clamp(min=0))
    return x.movedim(-1, 1)


def _feed_forward(steps: Steps, plan: AudioTower, weights: PartWeights, of: str, x: Frames) -> Frames:
    """What half a feed-forward adds. Source: `Gemma4AudioFeedForward`."""
    dtype = weights[f"{of}.pre_layer_norm.weight"].dtype
    x = limited(x, plan.clipping, dtype)
    x = steps.between(rmsnorm(DEFAULT_EPS, x, weights[f"{of}.pre_layer_norm.weight"]))
    x = steps.between(clipped_linear(weights, f"{of}.ffw_layer_1", x, clipped=plan.clipped))
    x = steps.between(silu(x))
    x = steps.between(clipped_linear(weights, f"{of}.ffw_layer_2", x, clipped=plan.clipped))
    x = rmsnorm(DEFAULT_EPS, limited(x, plan.clipping, dtype), weights[f"{of}.post_layer_norm.weight"])
    return plan.residual_weight * steps.between(x)


def _convolve(steps: Steps, plan: AudioTower, weights: PartWeights, x: Frames) -> Frames:
    """What the light convolution adds: each channel mixed over the last frames.

    Source: `Gemma4AudioLightConv1d`.
    """
    x = steps.between(rmsnorm(plan.norm_eps, x, weights["lconv1d.pre_layer_norm.weight"]))
    x = steps.between(clipped_linear(weights, "lconv1d.linear_start", x, clipped=plan.clipped))
    x = steps.between(glu(x)).transpose(1, 2)
    kernel = weights["lconv1d.depthwise_conv1d.weight"]
    x = conv1d(pad(x, (plan.kernel - 1, 0)), kernel.double(), groups=plan.hidden_size).transpose(1, 2)
    x = limited(steps.between(x), plan.clipping, kernel.dtype)
    x = steps.between(rmsnorm(plan.norm_eps, x, weights["lconv1d.conv_norm.weight"]))
    x = steps.between(silu(x))
    return clipped_linear(weights, "lconv1d.linear_end", x, clipped=plan.clipped)


def _attend(steps: Steps, plan: AudioTower, weights: PartWeights, x: Frames, real: FrameMask) -> Frames:
    """The attention's answer, before its norm.

        score = cap * tanh((query . key + query . embedding of the distance) / cap)

    Frames are taken in chunks; a chunk is scored against `context` frames, from `left - 1` before its
    first on. What is not seen there (too far, padding, or no frame at all, whose value is zero) has a score
    hugely below the others: a frame that sees nothing takes the plain mean of its chunk's context.
    Source: `Gemma4AudioAttention`; the distances are those of Dai et al., "Transformer-XL" (2019).
    """

    def heads(name: str) -> Float[Tensor, "audios frames heads head_dim"]:
        projected = clipped_linear(weights, f"self_attn.{name}", x, clipped=plan.clipped)
        return steps.between(projected).unflatten(-1, (plan.num_heads, -1))

    count = x.shape[1]
    query = torch.arange(count, device=x.device)
    first = query // plan.chunk * plan.chunk - (plan.left - 1)
    key = first[:, None] + torch.arange(plan.context, device=x.device)  # [frames context]
    back = query[:, None] - key
    exists = (key >= 0) & (key < count)
    near = (back >= 0) & (back < plan.left - 1) | (back < 0) & (-back < plan.right)
    at = key.clamp(0, count - 1)
    seen = (near & exists) & real[:, at]  # [audios frames context]

    # In units of log 2, as what was once a softplus to the base of 2.
    scale = plan.head_dim**-0.5 / math.log(2) * softplus(weights["self_attn.per_dim_scale"].double())
    queries = heads("q_proj") * scale
    keys = heads("k_proj") * (math.log(1 + math.e) / math.log(2))
    scores = torch.einsum("bqhd,bqohd->bhqo", queries, keys[:, at])
    scores = scores + _by_distance(steps, plan, weights, queries, back)
    scores = softcap(plan.logit_cap, scores).masked_fill(~seen[:, None], plan.hidden_logit)
    values = heads("v_proj")[:, at] * exists[:, :, None, None]
    mixed = steps.between(torch.einsum("bhqo,bqohd->bqhd", softmax(scores), values).flatten(2))
    return steps.between(clipped_linear(weights, "self_attn.post", mixed, clipped=plan.clipped))


def _by_distance(
    steps: Steps, plan: AudioTower, weights: PartWeights, queries: Tensor, back: Tensor
) -> Float[Tensor, "audios heads frames context"]:
    """What each query makes of how far back a key lies.

    Half the context's distances have an embedding; on the published checkpoints these are all that are seen.
    """
    furthest = plan.context // 2
    # transformers counts from the middle of the context, which is `left - 1` frames back if that is its half.
    distance = back + furthest - (plan.left - 1)
    known = torch.arange(furthest + 1, device=back.device)
    embeddings = steps.between(sinusoids(known, plan.hidden_size))
    embeddings = steps.between(linear(weights["self_attn.relative_k_proj.weight"], embeddings))
    by_known = torch.einsum("bqhd,nhd->bhqn", queries, embeddings.unflatten(-1, (plan.num_heads, -1)))
    index = distance.clamp(0, furthest).expand(*by_known.shape[:2], -1, -1)
    inside = (distance >= 0) & (distance <= furthest)
    return by_known.gather(-1, index) * inside


def _plan(weights: Weights) -> AudioTower:
    plan = None if weights.towers is None else weights.towers.audio
    if not isinstance(plan, AudioTower):
        raise BadArgument(
            "these weights have no audio tower; pass a gemma4 wrapper's config and state_dict()."
        )
    return plan


def _check(weights: Weights, sounds: Tensor, real: Tensor) -> None:
    plan = _plan(weights)
    if sounds.dim() != 3 or not sounds.is_floating_point():
        raise BadArgument(f"input_features are [audios frames bins], not {list(sounds.shape)}.")
    read = plan.channels[0] // 4
    if -(-sounds.shape[-1] // 4) != read:
        raise BadArgument(f"input_features have {sounds.shape[-1]} mel bins; this tower reads {4 * read}.")
    if real.shape != sounds.shape[:2]:
        raise BadArgument(f"input_features_mask is {list(real.shape)}; it is {list(sounds.shape[:2])}.")
