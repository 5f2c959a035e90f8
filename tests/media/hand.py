"""The towers, the poolers and the projectors by hand, in float64, from a module's weights alone.

Written as loops over images, patches, frames and heads, after the formulas; no module of transformers runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def under(module: Any, prefix: str) -> Weights:
    """Weights and buffers under a name, in float64."""
    return {
        name.removeprefix(f"{prefix}."): value.double()
        for name, value in module.state_dict().items()
        if name.startswith(f"{prefix}.")
    }


def rms(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight


def centred(x: Tensor, w: Weights, name: str, eps: float = 1e-5) -> Tensor:
    """A layer norm."""
    moved = x - x.mean(-1, keepdim=True)
    normed = moved / (moved.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed * w[f"{name}.weight"] + w.get(f"{name}.bias", torch.zeros(()))


def clipped(x: Tensor, w: Weights, name: str) -> Tensor:
    """A linear whose input and output are clipped where the checkpoint says so."""
    if f"{name}.input_min" in w:
        x = x.clamp(w[f"{name}.input_min"], w[f"{name}.input_max"])
    y = x @ w[f"{name}.linear.weight"].T
    if f"{name}.output_min" in w:
        y = y.clamp(w[f"{name}.output_min"], w[f"{name}.output_max"])
    return y


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def projected(module: Any, prefix: str, x: Tensor, eps: float = 1e-6) -> Tensor:
    """A `*MultimodalEmbedder`."""
    return rms(x, eps=eps) @ under(module, prefix)["embedding_projection.weight"].T


# ---- images ------------------------------------------------------------------------------------------------


def vision(module: Any, pixels: Tensor, places: Tensor) -> dict[str, Tensor]:
    """Every value of the tower and its projector, by path, `image_features` last."""
    if not hasattr(module.model, "vision_tower"):
        return embedded(module, pixels, places)
    w, config = under(module, "model.vision_tower"), module.config.vision_config
    real = (places != -1).all(-1)
    found: dict[str, Tensor] = {"vision.patch_mask": real}
    x = 2 * (pixels.double() - 0.5) @ w["patch_embedder.input_proj.weight"].T
    found["vision.patch_embeddings"] = x.clone()
    table = w["patch_embedder.position_embedding_table"]
    for i, patch in real.nonzero().tolist():
        column, row = places[i, patch].tolist()
        x[i, patch] += table[0, column] + table[1, row]
    for block in range(config.num_hidden_layers):
        mine = {
            n.removeprefix(f"encoder.layers.{block}."): v
            for n, v in w.items()
            if n.startswith(f"encoder.layers.{block}.")
        }
        x = _vision_block(config, mine, x, places, real, found, f"vision.layers[{block}]")
    found["vision.tower_output"] = x
    soft = torch.cat([pooled(config, x[i], places[i], real[i]) for i in range(len(x))])
    if config.standardize:
        soft = (soft - w["std_bias"]) * w["std_scale"]
    found["projector.soft_tokens"] = soft
    found["features"] = projected(module, "model.embed_vision", soft, config.rms_norm_eps)
    return found


def pooled(config: Any, x: Tensor, places: Tensor, real: Tensor) -> Tensor:
    """The soft tokens of one image: each kernel's mean, row by row, scaled by the width's root."""
    k = config.pooling_kernel_size
    columns, rows = ((places[real].amax(0) + 1) // k).tolist()
    kernels = torch.zeros(rows, columns, x.shape[-1], dtype=x.dtype)
    for patch in real.nonzero().flatten().tolist():
        column, row = places[patch].tolist()
        kernels[row // k, column // k] += x[patch] / k**2
    return kernels.flatten(0, 1) * math.sqrt(config.hidden_size)


def _vision_block(
    config: Any, w: Weights, x: Tensor, places: Tensor, real: Tensor, found: dict[str, Tensor], at: str
) -> Tensor:
    heads, size, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
    found[f"{at}.layer_input"] = x
    h = found[f"{at}.self_attn.attention_input"] = rms(x, w["input_layernorm.weight"], eps)
    q, k, v = (clipped(h, w, f"self_attn.{n}_proj").unflatten(-1, (-1, size)).transpose(1, 2) for n in "qkv")
    q = turned(config, rms(q, w["self_attn.q_norm.weight"], eps), places)
    k = turned(config, rms(k, w["self_attn.k_norm.weight"], eps), places)
    v = rms(v, eps=eps)
    for name, value in (("keys", k), ("values", v)):
        found[f"{at}.self_attn.own_{name}"] = found[f"{at}.self_attn.attention_{name}"] = value
    found[f"{at}.self_attn.attention_queries"] = q
    scores = torch.zeros(len(x), heads, x.shape[1], x.shape[1], dtype=x.dtype)
    for head in range(heads):
        scores[:, head] = q[:, head] @ k[:, head * k.shape[1] // heads].transpose(1, 2)  # scaled by one
    seen = real[:, None, None, :].expand_as(scores)
    scores = scores.masked_fill(~seen, -torch.inf)
    pattern = scores.exp() / scores.exp().sum(-1, keepdim=True)
    mixed = torch.einsum("ihqk,ihkd->iqhd", pattern, v)
    found[f"{at}.self_attn.attention_scores"] = scores
    found[f"{at}.self_attn.attention_probabilities"] = pattern
    found[f"{at}.self_attn.visible_keys"] = seen
    found[f"{at}.self_attn.attention_head_outputs"] = mixed
    y = found[f"{at}.self_attn.attention_projection"] = clipped(mixed.flatten(2), w, "self_attn.o_proj")
    y = found[f"{at}.self_attn.attention_output"] = rms(y, w["post_attention_layernorm.weight"], eps)
    x = found[f"{at}.mid_stream"] = x + y
    h = found[f"{at}.mlp.mlp_input"] = rms(x, w["pre_feedforward_layernorm.weight"], eps)
    n = gelu(clipped(h, w, "mlp.gate_proj")) * clipped(h, w, "mlp.up_proj")
    found[f"{at}.mlp.mlp_neurons"] = n
    y = found[f"{at}.mlp.mlp_projection"] = clipped(n, w, "mlp.down_proj")
    y = found[f"{at}.mlp.mlp_output"] = rms(y, w["post_feedforward_layernorm.weight"], eps)
    x = found[f"{at}.layer_output"] = x + y
    return x


def turned(config: Any, x: Tensor, places: Tensor) -> Tensor:
    """The axial rotary embedding: the first half of a head turns with the column, the second with the row."""
    theta, half = config.rope_parameters["rope_theta"], config.head_dim // 2
    result = x.clone()
    for axis in range(2):
        for j in range(half // 2):
            angle = places[..., axis].double()[:, None] * theta ** (-2 * j / half)
            a, b = axis * half + j, axis * half + half // 2 + j
            result[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
            result[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return result


def embedded(module: Any, pixels: Tensor, places: Tensor) -> dict[str, Tensor]:
    """12B's embedder of patches."""
    w = under(module, "model.embed_vision")
    real = (places != -1).all(-1)
    x = centred(pixels.double(), w, "patch_ln1") @ w["patch_dense.weight"].T + w["patch_dense.bias"]
    x = centred(x, w, "patch_ln2")
    found = {"vision.patch_mask": real, "vision.patch_embeddings": x.clone()}
    for i, patch in real.nonzero().tolist():
        column, row = places[i, patch].tolist()
        x[i, patch] += w["pos_embedding"][column, 0] + w["pos_embedding"][row, 1]
    x = found["vision.tower_output"] = centred(x, w, "pos_norm")
    eps = module.config.vision_config.rms_norm_eps
    found["features"] = projected(module, "model.embed_vision.multimodal_embedder", x[real], eps)
    return found


# ---- sound -------------------------------------------------------------------------------------------------


def sound(module: Any, features: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Every value of the audio tower and its projector, by path, `audio.audio_features` last."""
    config = module.config.audio_config
    if not hasattr(module.model, "audio_tower"):
        found = {"audio.tower_output": features.double(), "audio.frame_mask": mask}
        x = projected(module, "model.embed_audio", features.double(), config.rms_norm_eps)
        return found | {"audio.audio_features": x[mask]}
    w = under(module, "model.audio_tower")
    x, real = features.double()[:, None], mask
    for layer in range(2):
        name = f"subsample_conv_projection.layer{layer}"
        x = _strided(x * real[:, None, :, None], w[f"{name}.conv.weight"])
        x = centred(x.movedim(1, -1), w, f"{name}.norm", config.rms_norm_eps).movedim(-1, 1).clamp(min=0)
        real = real[:, ::2]
    x = x.movedim(1, -1).flatten(2) @ w["subsample_conv_projection.input_proj_linear.weight"].T
    found = {"audio.frame_embeddings": x}
    for block in range(config.num_hidden_layers):
        mine = {
            n.removeprefix(f"layers.{block}."): v for n, v in w.items() if n.startswith(f"layers.{block}.")
        }
        x = _conformer(config, mine, x, real, found, f"audio.layers[{block}]")
    found["audio.tower_output"], found["audio.frame_mask"] = x, real
    x = found["audio_projector.soft_tokens"] = x @ w["output_proj.weight"].T + w["output_proj.bias"]
    return found | {
        "audio.audio_features": projected(module, "model.embed_audio", x, config.rms_norm_eps)[real]
    }


def _strided(x: Tensor, weight: Tensor) -> Tensor:
    """A 3 x 3 convolution that takes every other place."""
    height, width = ((size + 1) // 2 for size in x.shape[2:])
    x = torch.nn.functional.pad(x, (1, 1, 1, 1))
    result = torch.zeros(len(x), len(weight), height, width, dtype=x.dtype)
    for row in range(height):
        for column in range(width):
            window = x[:, :, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3]
            result[:, :, row, column] = torch.einsum("bcyx,ocyx->bo", window, weight)
    return result


def _conformer(config: Any, w: Weights, x: Tensor, real: Tensor, found: dict[str, Tensor], at: str) -> Tensor:
    eps, limit = 1e-6, config.gradient_clipping
    found[f"{at}.layer_input"] = x
    for name in ("feed_forward1", "", "feed_forward2"):
        if name:
            h = rms(x.clamp(-limit, limit), w[f"{name}.pre_layer_norm.weight"], eps)
            h = clipped(silu(clipped(h, w, f"{name}.ffw_layer_1")), w, f"{name}.ffw_layer_2")
            h = rms(h.clamp(-limit, limit), w[f"{name}.post_layer_norm.weight"], eps) * config.residual_weight
            found[f"{at}.{name}.mlp_output"] = h
            x = x + h
            continue
        h = rms(x.clamp(-limit, limit), w["norm_pre_attn.weight"], eps)
        h = _heard(config, w, h, real).clamp(-limit, limit)
        h = found[f"{at}.self_attn.attention_output"] = rms(h, w["norm_post_attn.weight"], eps)
        x = x + h
        h = found[f"{at}.lconv1d.convolution_output"] = _convolved(config, w, x)
        x = x + h
    x = found[f"{at}.layer_output"] = rms(x.clamp(-limit, limit), w["norm_out.weight"], eps)
    return x


def _heard(config: Any, w: Weights, x: Tensor, real: Tensor) -> Tensor:
    """The attention: each frame hears itself and a few frames back, and how far back each is."""
    heads = config.num_attention_heads
    size = config.hidden_size // heads
    back = config.attention_context_left - 1
    q, k, v = (clipped(x, w, f"self_attn.{n}_proj").unflatten(-1, (heads, size)) for n in "qkv")
    scale = torch.log1p(w["self_attn.per_dim_scale"].exp()) * size**-0.5 / math.log(2)
    q, k = q * scale, k * math.log(1 + math.e) / math.log(2)
    rates = torch.tensor(
        [10000.0 ** (-i / (config.hidden_size // 2 - 1)) for i in range(config.hidden_size // 2)]
    )
    mixed = torch.zeros_like(v)
    for audio, frame in real.nonzero().tolist():
        scores, heard = [], [f for f in range(max(0, frame - back + 1), frame + 1) if real[audio, f]]
        for other in heard:
            angle = (frame - other) * rates.double()
            relative = torch.cat([angle.sin(), angle.cos()]) @ w["self_attn.relative_k_proj.weight"].T
            scores.append(
                (q[audio, frame] * (k[audio, other] + relative.unflatten(0, (heads, size)))).sum(-1)
            )
        cap = config.attention_logit_cap
        pattern = (torch.tanh(torch.stack(scores) / cap) * cap).softmax(0)
        mixed[audio, frame] = sum(p[:, None] * v[audio, f] for p, f in zip(pattern, heard, strict=True))
    return clipped(mixed.flatten(2), w, "self_attn.post")


def _convolved(config: Any, w: Weights, x: Tensor) -> Tensor:
    eps = config.rms_norm_eps
    h = clipped(rms(x, w["lconv1d.pre_layer_norm.weight"], eps), w, "lconv1d.linear_start")
    one, gate = h.chunk(2, -1)
    h = one / (1 + torch.exp(-gate))
    kernel = w["lconv1d.depthwise_conv1d.weight"][:, 0]
    summed = torch.zeros_like(h)
    for frame in range(h.shape[1]):
        for tap in range(kernel.shape[1]):
            earlier = frame - (kernel.shape[1] - 1 - tap)
            if earlier >= 0:
                summed[:, frame] += h[:, earlier] * kernel[:, tap]
    h = rms(
        summed.clamp(-config.gradient_clipping, config.gradient_clipping), w["lconv1d.conv_norm.weight"], eps
    )
    return clipped(silu(h), w, "lconv1d.linear_end")
