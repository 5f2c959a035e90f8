"""The values of the whole model: what it was called with, what enters the blocks, and its answer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ..layouts import Distribution, Logits, PerLayerInputs, Residual, Tokens
from ..ledger import is_fake, running
from ..served import Field, Keyword, TokenMask, served
from .absence import no_audio, no_per_layer_inputs, no_vision
from .base import StandardEnvoy

__all__ = ["Root"]


class Root(StandardEnvoy):
    """The root's values; `StandardizedTransformer` adds loading and the verbs."""

    PARTS: ClassVar = {
        "vision": no_vision,
        "projector": no_vision,
        "audio": no_audio,
        "audio_projector": no_audio,
    }

    @property
    def standard_path(self) -> str:
        return ""

    def _neighbours(self) -> list[tuple[str, type]]:
        block = self.layers[0]
        hosts = (block, block.self_attn, block.mlp)
        return [
            *super()._neighbours(),
            *((host.standard_path.replace("[0]", "[i]"), type(host)) for host in hosts),
        ]

    @property
    def stack(self) -> Any:
        """The module that holds `embed_tokens`, `layers` and `norm`."""
        return self.layers.parent

    @served("input", piece=Keyword("input_ids"), private=True)
    def input_ids(self, value: Any) -> Tokens:
        """The token ids the model was called with, padding included.

        Layout: [batch seq], int64. In `generate`, each step's own: the prompt, then one token a step.
        """
        return value

    @served("input", piece=TokenMask(), private=True)
    def attention_mask(self, value: Any) -> Tokens:
        """Which tokens are real (1) and which are padding (0).

        Layout: [batch seq], int64; in `generate` it covers the cached tokens as well.
        """
        return value

    @served("embed_tokens.output")
    def token_embeddings(self, value: Any) -> Residual:
        """The embedding module's output, its scale of `sqrt(hidden_size)` included.

        Layout: [batch seq hidden]. The stream that enters block 0, before any image or sound is put in.
        """
        return value

    @served("embed_tokens_per_layer.output", of="stack", needs=no_per_layer_inputs)
    def per_layer_token_inputs(self, value: Any) -> PerLayerInputs:
        """The token's own half of the per-layer inputs: a table lookup, scaled by `sqrt(ple)`.

        Layout: [batch seq layers ple].
        Raises: Unavailable, on a checkpoint without per-layer embeddings.
        """
        plan = self.model_plan
        return value.unflatten(-1, (plan.num_layers, plan.per_layer_input_size))

    per_layer_token_inputs.back(lambda _host, new, _piece: new.flatten(-2))

    @served("per_layer_projection_norm.output", of="stack", needs=no_per_layer_inputs)
    def per_layer_context_inputs(self, value: Any) -> PerLayerInputs:
        """The half projected from the embeddings, after its norm.

        Layout: [batch seq layers ple].
        Raises: Unavailable, on a checkpoint without per-layer embeddings.
        """
        return value

    @served("source.per_layer_inputs.output", of="stack", needs=no_per_layer_inputs)
    def per_layer_inputs(self, value: Any) -> PerLayerInputs:
        """The mix the blocks receive: the sum of both halves, times `sqrt(1/2)`.

        Layout: [batch seq layers ple]; block i receives `[:, :, i]` as its `per_layer_input`.
        Raises: Unavailable, on a checkpoint without per-layer embeddings.
        """
        return value

    @served("lm_head.output")
    def raw_logits(self, value: Any) -> Logits:
        """The output of `lm_head`, before the soft cap.

        Layout: [batch seq vocab]; in `generate` the last position of each step only.
        """
        return value

    @served("output", piece=Field("logits"))
    def logits(self, value: Any) -> Logits:
        """The model's answer: `cap * tanh(raw_logits / cap)`, cap 30.

        Layout: [batch seq vocab]; in `generate` the last position of each step only. A write there
        decides the next token.
        """
        return value

    @served(
        "output",
        piece=Field("logits"),
        read_only="it is computed from the logits, and nothing in the model reads it.\nWrite logits.",
    )
    def next_token_probs(self, value: Any) -> Distribution:
        """The distribution of the next token: the softmax of the last position's logits, in float32.

        Layout: [batch vocab]. Read only.
        """
        return _last_real(self, value).float().softmax(-1)


def _last_real(host: Any, logits: torch.Tensor) -> torch.Tensor:
    """The logits at each row's last real token, `[batch vocab]`: the last column but for right padding."""
    mediator = running(host.interleaver)
    mask = host.interleaver.encoding.get("attention_mask")
    if mediator is None or not isinstance(mask, torch.Tensor) or mask.shape[-1:] != logits.shape[1:2]:
        return logits[:, -1]
    group = mediator.batch_group
    mask = mask if group is None else mask[group[0] : group[0] + group[1]]
    if mask.dim() != 2 or mask.shape[0] != logits.shape[0] or is_fake(mask) or bool(mask[:, -1].all()):
        return logits[:, -1]
    last = mask.shape[1] - 1 - mask.flip(-1).to(torch.int64).argmax(-1)
    return logits[torch.arange(len(last), device=logits.device), last.to(logits.device)]
