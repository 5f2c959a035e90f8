"""A block of the text stack: the stream at its entrance, its middle and its exit.

    x1  = x  + attention_output
    x2  = x1 + mlp_output
    x3  = x2 + per_layer_output          # where the checkpoint has per-layer embeddings
    out = x3 * layer_scalar

Contributions are unscaled: `(layer_input + attention_output + mlp_output [+ per_layer_output]) *
layer_scalar == layer_output`.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..layouts import PerLayerInput, Residual
from ..served import Argument, served
from .absence import no_per_layer_inputs
from .base import Operation, PartOfBlock
from .facts import BlockFacts

__all__ = ["Layer"]


class Layer(BlockFacts, PartOfBlock):
    """One block; `layers[i]`."""

    OPERATIONS: ClassVar[dict[str, Operation]] = {
        # The attention's add: what it binds is both the residual and the input of the MLP's norm.
        "attention_add": Operation("hidden_states", "hidden_states = residual + hidden_states"),
    }

    @property
    def block(self) -> Layer:
        return self

    @property
    def index(self) -> int:
        """The block's place in the stack, from 0."""
        return int(self._module.layer_idx)  # pyright: ignore[reportArgumentType]  # torch types it as a tensor

    @property
    def standard_path(self) -> str:
        return f"layers[{self.index}]"

    @served("input", piece=Argument(0, "hidden_states"), renamed=True)
    def layer_input(self, value: Any) -> Residual:
        """The stream entering the block.

        Layout: [batch seq hidden]. A write reaches the block's attention and its residual.
        """
        return value

    @served(
        "input",
        piece=Argument(1, "per_layer_input"),
        needs=no_per_layer_inputs,
        renamed=True,
        kept_by_autograd=True,
    )
    def per_layer_input(self, value: Any) -> PerLayerInput:
        """This block's slice of `per_layer_inputs`, which gates its per-layer branch.

        Layout: [batch seq ple]. A write changes this block alone.
        Raises: Unavailable, on a checkpoint without per-layer embeddings.
        """
        return value

    @served("source.attention_add.output")
    def mid_stream(self, value: Any) -> Residual:
        """The stream after the attention's add.

        Layout: [batch seq hidden], equal to `layer_input + attention_output`. A write reaches the
        MLP, the router of a mixture, and the residual.
        """
        return value

    @served("post_per_layer_input_norm.output", needs=no_per_layer_inputs)
    def per_layer_output(self, value: Any) -> Residual:
        """What the per-layer branch adds to the stream, unscaled.

        Layout: [batch seq hidden].
        Raises: Unavailable, on a checkpoint without per-layer embeddings.
        """
        return value

    @served("output")
    def layer_output(self, value: Any) -> Residual:
        """The stream leaving the block, after `layer_scalar`.

        Layout: [batch seq hidden]. It is the very tensor the next block receives.
        """
        return value
