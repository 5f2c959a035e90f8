"""The attention of a text block: every value, under any implementation, private or shared.

    queries = rope(q_norm(q_proj(attention_input)))
    own_keys, own_values                       # computed here, cached, lent to borrowers
    attention_keys, attention_values           # what this block attends with, private to it
    scores = scaling * queries @ keys^T, masked;   pattern = softmax(scores)
    head_outputs = pattern @ values;   attention_projection = o_proj(head_outputs)
    attention_output = post_attention_layernorm(attention_projection)

Queries, keys, values, scores, pattern and head outputs belong to one moment and may be read in any order.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

from ..layouts import HeadOutputs as HeadOutputsLayout
from ..layouts import Keys, OwnKeys, Pattern, Queries, Residual, VisibleKeys
from ..served import Argument, Item, Moment, served
from .absence import borrows, keys_are_values, no_pattern
from .base import Operation, PartOfBlock
from .call import CALL, AtCall, HeadOutputs
from .facts import BlockFacts

__all__ = ["Attention"]

OWN: Final = Moment(
    "own keys and values",
    of="self",
    anchor="source.own_keys.output",
    members=("source.own_keys.output", "source.own_values.output"),
)


class Attention(BlockFacts, PartOfBlock):
    """`layers[i].self_attn`."""

    OPERATIONS: ClassVar[dict[str, Operation]] = {
        "attention_call": Operation(
            "attention_interface", "attn_output, attn_weights = attention_interface("
        ),
        "own_keys": Operation("key_states", "key_states = key_states.transpose(1, 2)"),
        "own_values": Operation("value_states", "value_states = value_states.transpose(1, 2)"),
    }

    PARTS: ClassVar = {
        "k_proj": borrows("keys"),
        "k_norm": borrows("keys"),
        "v_norm": borrows("values"),
        "v_proj": keys_are_values,
    }

    @served("input_layernorm.output", of="block")
    def attention_input(self, value: Any) -> Residual:
        """The normed stream that the projections read.

        Layout: [batch seq hidden]. A write reaches the queries and, on a block that computes its
        own, the keys and values.
        """
        return value

    @served("source.own_keys.output", needs=borrows("keys"), moment=OWN)
    def own_keys(self, value: Any) -> OwnKeys:
        """The keys this block computes, normed and rotated, before they are cached or lent.

        Layout: [batch kv_heads seq head_dim]. A write reaches this block, every borrower, and later
        decoding steps.
        Raises: Unavailable, on a block that borrows, naming the block to edit.
        """
        return value

    @served("source.own_values.output", needs=borrows("values"), moment=OWN)
    def own_values(self, value: Any) -> OwnKeys:
        """The values this block computes, after `v_norm`, before they are cached or lent.

        Layout: [batch kv_heads seq head_dim]. A write reaches this block, every borrower, and later
        decoding steps. Where the block has no `v_proj` they are the keys' projection, normed, unrotated.
        Raises: Unavailable, on a block that borrows, naming the block to edit.
        """
        return value

    @AtCall("queries")
    def attention_queries(self, value: Any) -> Queries:
        """The queries, after `q_norm` and the rotary embedding.

        Layout: [batch heads query head_dim].
        """
        return value

    @AtCall("keys")
    def attention_keys(self, value: Any) -> Keys:
        """The keys this block attends with, cached and borrowed ones included, as its private copy.

        Layout: [batch kv_heads key head_dim]. A write changes this block in this forward and nothing
        else: no borrower, no lender, no later step.
        """
        return value

    @AtCall("values")
    def attention_values(self, value: Any) -> Keys:
        """The values this block attends with, cached and borrowed ones included, as its private copy.

        Layout: [batch kv_heads key head_dim]. A write changes this block in this forward and nothing
        else: no borrower, no lender, no later step.
        """
        return value

    @AtCall("scores", needs=no_pattern)
    def attention_scores(self, value: Any) -> Pattern:
        """The scores, scaled (Gemma 4 scales by 1) and masked, before the softmax.

        Layout: [batch heads query key]. What a query may not see is -inf under a fused kernel and
        hugely negative under eager, as there. A write replaces the block's pattern.
        Raises: Unavailable, under flash attention.
        """
        return value

    @AtCall("pattern", needs=no_pattern)
    def attention_probabilities(self, value: Any) -> Pattern:
        """The pattern: how much each query attends to each key.

        Layout: [batch heads query key]; rows sum to one over the visible keys. Under a fused kernel
        this block computes it from its queries, keys and mask, with the softmax in float32. A write
        replaces the block's mix of values; an untouched read leaves the run as it was, bit for bit.
        Raises: Unavailable, under flash attention.
        Source: transformers' `eager_attention_forward`.
        """
        return value

    @AtCall(
        "visible",
        needs=no_pattern,
        read_only="it is what the model was given.\nTo hide keys write attention_scores: "
        "`scores.masked_fill_(hidden, -torch.inf)`.",
    )
    def visible_keys(self, value: Any) -> VisibleKeys:
        """Which keys each query may see: the mask that this block really used.

        Layout: [batch heads query key], true where the key is seen: causal, within the window, padding
        left out, and both ways among the tokens of one image where the checkpoint has it so. Read only.
        Raises: Unavailable, under flash attention.
        """
        return value

    @HeadOutputs(f"{CALL}.output", piece=Item(0), kept_by_autograd=True)
    def attention_head_outputs(self, value: Any) -> HeadOutputsLayout:
        """Each head's mix of values, before `o_proj`.

        Layout: [batch query heads head_dim].
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
