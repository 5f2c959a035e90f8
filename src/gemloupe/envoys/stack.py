"""The text stack: where the per-layer inputs are mixed and handed to the blocks."""

from __future__ import annotations

from typing import ClassVar

from .base import Operation, StandardEnvoy

__all__ = ["PerLayerStack", "Stack"]


class Stack(StandardEnvoy):
    """The module that holds `embed_tokens`, `layers` and `norm`."""

    OPERATIONS: ClassVar[dict[str, Operation]] = {
        # Drops all but the last prompt position before the blocks that borrow keys and values.
        "drop_prompt": Operation(
            "self__maybe_slice_kv_shared_inputs", "self._maybe_slice_kv_shared_inputs(", since="5.23"
        ),
    }


class PerLayerStack(Stack):
    """A text stack whose code knows per-layer embeddings."""

    OPERATIONS: ClassVar[dict[str, Operation]] = {
        **Stack.OPERATIONS,
        "per_layer_inputs": Operation(
            "per_layer_inputs", "per_layer_inputs = self.project_per_layer_inputs(inputs_embeds"
        ),
    }
