"""Gemma 4's forward once more, from its weights and in plain float64 tensor operations.

`expected` computes each value from the weights and from the values that precede it, as they were served:
an error cannot hide behind a later one, and the tolerance stays that of one step. What a value is made of
is read in the design's equations and in the config; nothing of `gemloupe` is used.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.core.places import Place


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    scaled = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled if weight is None else scaled * weight


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: Tensor) -> Tensor:
    powers = (x - x.max(-1, keepdim=True).values).exp()
    return powers / powers.sum(-1, keepdim=True)


def cap(x: Tensor, limit: float) -> Tensor:
    return limit * torch.tanh(x / limit)


def turn(x: Tensor, positions: Tensor, parameters: dict[str, Any]) -> Tensor:
    """The rotary embedding of `[batch seq heads head_dim]`: pairs are half a head apart."""
    half = x.shape[-1] // 2
    turning = half
    if parameters["rope_type"] == "proportional":
        turning = int(parameters["partial_rotary_factor"] * x.shape[-1] // 2)
    exponents = torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1]
    speed = parameters["rope_theta"] ** -exponents
    speed[turning:] = 0
    angle = (positions[..., None] * speed)[:, :, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )


class Oracle:
    """The weights of a bare model, in float64, by their names inside the text stack."""

    def __init__(self, module: Any) -> None:
        self.text = module.config.get_text_config()
        self.stored = self.text.to_dict()
        self.eps = self.text.rms_norm_eps
        self.dtype = module.dtype
        self.weights = {
            name.removeprefix("model.").removeprefix("language_model."): tensor.detach().double()
            for name, tensor in module.state_dict().items()
        }
        self.blocks = self.text.num_hidden_layers
        self.kinds = self.text.layer_types
        self.first_borrower = self.blocks - self.text.num_kv_shared_layers

    def of(self, block: int, name: str) -> Tensor:
        return self.weights[f"layers.{block}.{name}"]

    def has(self, block: int, name: str) -> bool:
        return f"layers.{block}.{name}" in self.weights

    def scale(self, width: int) -> float:
        """The embedding's scale is kept in the weights' dtype."""
        return torch.tensor(width**0.5).to(self.dtype).double().item()

    def normed(self, x: Tensor, block: int, name: str) -> Tensor:
        return norm(x, self.of(block, f"{name}.weight"), self.eps)

    def source(self, block: int) -> int:
        if block < self.first_borrower:
            return block
        return max(i for i in range(self.first_borrower) if self.kinds[i] == self.kinds[block])

    # -- the parts -------------------------------------------------------------------------------

    def keys_and_values(self, block: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        width = self.of(block, "self_attn.k_norm.weight").shape[0]
        raw = (x @ self.of(block, "self_attn.k_proj.weight").T).unflatten(-1, (-1, width))
        if self.has(block, "self_attn.v_proj.weight"):
            values = (x @ self.of(block, "self_attn.v_proj.weight").T).unflatten(-1, (-1, width))
        else:
            values = raw
        keys = norm(raw, self.of(block, "self_attn.k_norm.weight"), self.eps)
        return turn(keys, positions, self.text.rope_parameters[self.kinds[block]]), norm(
            values, None, self.eps
        )

    def pattern_mask(self, block: int, mask: Tensor) -> Tensor:
        """Which keys each query sees, `[batch query key]`."""
        place = torch.arange(mask.shape[1])
        back = place[:, None] - place[None, :]
        seen = back >= 0
        if self.kinds[block] == "sliding_attention":
            seen = seen & (back < self.text.sliding_window)
        return seen[None] & mask.bool()[:, None, :]

    def attention(self, block: int, x: Tensor, source_x: Tensor, mask: Tensor) -> Tensor:
        """`o_proj`'s output; rows of padding are meaningless."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        width = self.of(block, "self_attn.q_norm.weight").shape[0]
        queries = (x @ self.of(block, "self_attn.q_proj.weight").T).unflatten(-1, (-1, width))
        queries = norm(queries, self.of(block, "self_attn.q_norm.weight"), self.eps)
        queries = turn(queries, positions, self.text.rope_parameters[self.kinds[block]])
        keys, values = self.keys_and_values(self.source(block), source_x, positions)
        group = queries.shape[2] // keys.shape[2]
        keys, values = keys.repeat_interleave(group, 2), values.repeat_interleave(group, 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys)
        scores = scores.masked_fill(~self.pattern_mask(block, mask)[:, None], -1e30)
        mixed = torch.einsum("bhqk,bkhd->bqhd", softmax(scores), values)
        return mixed.flatten(2) @ self.of(block, "self_attn.o_proj.weight").T

    def neurons(self, block: int, x: Tensor) -> Tensor:
        gate, up = (self.of(block, f"mlp.{name}_proj.weight") for name in ("gate", "up"))
        return gelu(x @ gate.T) * (x @ up.T)

    def router_logits(self, block: int, stream: Tensor) -> Tensor:
        x = norm(stream, None, self.eps) * self.of(block, "router.scale") * stream.shape[-1] ** -0.5
        return x @ self.of(block, "router.proj.weight").T

    def expert_weights(self, block: int, probabilities: Tensor, indices: Tensor) -> Tensor:
        chosen = probabilities.gather(-1, indices)
        return chosen / chosen.sum(-1, keepdim=True) * self.of(block, "router.per_expert_scale")[indices]

    def expert_outputs(self, block: int, stream: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        x = self.normed(stream, block, "pre_feedforward_layernorm_2")
        gate_up, down = self.of(block, "experts.gate_up_proj"), self.of(block, "experts.down_proj")
        gate, up = torch.einsum("bsh,bskih->bski", x, gate_up[indices]).chunk(2, -1)
        return torch.einsum("bski,bskhi->bskh", gelu(gate) * up, down[indices]) * weights[..., None]

    def both_branches(self, block: int, shared: Tensor, routed: Tensor) -> Tensor:
        return self.normed(shared, block, "post_feedforward_layernorm_1") + self.normed(
            routed, block, "post_feedforward_layernorm_2"
        )

    def per_layer_branch(self, block: int, stream: Tensor, given: Tensor) -> Tensor:
        gate = gelu(stream @ self.of(block, "per_layer_input_gate.weight").T)
        return self.normed(
            (gate * given) @ self.of(block, "per_layer_projection.weight").T,
            block,
            "post_per_layer_input_norm",
        )

    def blur(self, block: int, stream: Tensor, given: Tensor, eps: float) -> Tensor:
        """How far rounding may move the per-layer branch, relative to its size, for each token.

        A gate far below zero leaves next to nothing, little of which is exact: gelu adds one and a tanh of
        nearly minus one. The norm that follows makes it as large as any other.
        """
        gate, down = (
            self.of(block, f"{name}.weight") for name in ("per_layer_input_gate", "per_layer_projection")
        )
        scores = stream @ gate.T
        slip = eps * (stream.abs() @ gate.abs().T)
        spread = (gelu(scores + slip) - gelu(scores - slip)).abs() + eps * scores.abs()
        kept = gelu(scores) * given
        error = (spread * given.abs() + 2 * eps * kept.abs()) @ down.abs().T
        return error.norm(dim=-1, keepdim=True) / (kept @ down.T).norm(dim=-1, keepdim=True)

    def vocab(self, stream: Tensor) -> Tensor:
        """The final norm and the head, before the cap."""
        return norm(stream, self.weights["norm.weight"], self.eps) @ self.weights["embed_tokens.weight"].T

    # -- every value -----------------------------------------------------------------------------

    def expected(self, served: dict[Place, Tensor], inputs: dict[str, Tensor]) -> dict[Place, Tensor]:
        """Each value, from the weights, the inputs and the values served before it."""
        values = {p: v.detach().double() if v.is_floating_point() else v for p, v in served.items()}
        found: dict[Place, Tensor] = {Place(name): inputs[name] for name in ("input_ids", "attention_mask")}
        found |= self._entrance(values, inputs["input_ids"])
        for block in range(self.blocks):
            found |= self._block(block, values, inputs["attention_mask"])
        raw = self.vocab(values[Place("layer_output", self.blocks - 1)])
        found[Place("raw_logits")] = raw
        found[Place("logits")] = cap(values[Place("raw_logits")], self.text.final_logit_softcapping)
        found[Place("next_token_probs")] = softmax(values[Place("logits")][:, -1])
        return found

    def _entrance(self, values: dict[Place, Tensor], ids: Tensor) -> dict[Place, Tensor]:
        hidden = self.text.hidden_size
        embedded = self.weights["embed_tokens.weight"][ids] * self.scale(hidden)
        found = {Place("token_embeddings"): embedded}
        size = getattr(self.text, "hidden_size_per_layer_input", 0)
        if size:
            of_token = self.weights["embed_tokens_per_layer.weight"][ids] * self.scale(size)
            found[Place("per_layer_token_inputs")] = of_token.unflatten(-1, (self.blocks, size))
            context = values[Place("token_embeddings")] @ self.weights["per_layer_model_projection.weight"].T
            context = (context * hidden**-0.5).unflatten(-1, (self.blocks, size))
            weight = self.weights["per_layer_projection_norm.weight"]
            found[Place("per_layer_context_inputs")] = norm(context, weight, self.eps)
            halves = values[Place("per_layer_token_inputs")] + values[Place("per_layer_context_inputs")]
            found[Place("per_layer_inputs")] = halves / 2**0.5
        return found

    def _block(self, block: int, values: dict[Place, Tensor], mask: Tensor) -> dict[Place, Tensor]:
        def of(name: str, part: str = "", at: int = block) -> Tensor:
            return values[Place(name, at, part)]

        before = of("layer_output", at=block - 1) if block else values[Place("token_embeddings")]
        source = of("attention_input", "self_attn", at=self.source(block))
        found = {
            ("", "layer_input"): before,
            ("self_attn", "attention_input"): self.normed(of("layer_input"), block, "input_layernorm"),
            ("self_attn", "attention_projection"): self.attention(
                block, of("attention_input", "self_attn"), source, mask
            ),
            ("self_attn", "attention_output"): self.normed(
                of("attention_projection", "self_attn"), block, "post_attention_layernorm"
            ),
            ("", "mid_stream"): of("layer_input") + of("attention_output", "self_attn"),
            ("mlp", "mlp_input"): self.normed(of("mid_stream"), block, "pre_feedforward_layernorm"),
            ("mlp", "mlp_neurons"): self.neurons(block, of("mlp_input", "mlp")),
            ("mlp", "mlp_output"): self.normed(
                of("mlp_projection", "mlp"), block, "post_feedforward_layernorm"
            ),
        }
        dense = of("mlp_neurons", "mlp") @ self.of(block, "mlp.down_proj.weight").T
        if self.has(block, "router.scale"):
            indices, weights = of("expert_indices", "mlp"), of("expert_weights", "mlp")
            probabilities = of("router_probabilities", "mlp")
            found |= {
                ("mlp", "shared_expert_output"): dense,
                ("mlp", "router_logits"): self.router_logits(block, of("mid_stream")),
                ("mlp", "router_probabilities"): softmax(of("router_logits", "mlp")),
                ("mlp", "expert_indices"): probabilities.topk(self.text.top_k_experts, -1).indices,
                ("mlp", "expert_weights"): self.expert_weights(block, probabilities, indices),
                ("mlp", "expert_outputs"): self.expert_outputs(block, of("mid_stream"), indices, weights),
                ("mlp", "routed_output"): of("expert_outputs", "mlp").sum(2),
                ("mlp", "mlp_projection"): self.both_branches(
                    block, of("shared_expert_output", "mlp"), of("routed_output", "mlp")
                ),
            }
        else:
            found["mlp", "mlp_projection"] = dense
        stream = of("mid_stream") + of("mlp_output", "mlp")
        if self.has(block, "per_layer_input_gate.weight"):
            given = values[Place("per_layer_inputs")][:, :, block]
            found["", "per_layer_input"] = given
            found["", "per_layer_output"] = self.per_layer_branch(block, stream, of("per_layer_input"))
            stream = stream + of("per_layer_output")
        found["", "layer_output"] = stream * self.of(block, "layer_scalar")
        return {Place(name, block, part): value for (part, name), value in found.items()}
