"""The attention of a text block."""

from __future__ import annotations

from typing import Any

from ..layouts import Residual
from ..served import Argument, served
from .base import PartOfBlock
from .facts import BlockFacts

__all__ = ["Attention"]


class Attention(BlockFacts, PartOfBlock):
    """`layers[i].self_attn`."""

    @served("input_layernorm.output", of="block")
    def attention_input(self, value: Any) -> Residual:
        """The normed stream that the projections read.

        Layout: [batch seq hidden]. A write reaches the queries and, on a block that computes its
        own, the keys and values.
        """
        return value

    @served("post_attention_layernorm.input", of="block", piece=Argument(0, "hidden_states"))
    def attention_projection(self, value: Any) -> Residual:
        """The output of `o_proj`, before the post-norm.

        Layout: [batch seq hidden].
        """
        return value

    @served("post_attention_layernorm.output", of="block")
    def attention_output(self, value: Any) -> Residual:
        """What the attention adds to the stream, after its post-norm, unscaled.

        Layout: [batch seq hidden].
        """
        return value
