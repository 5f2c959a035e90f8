"""What the config says of a block, as plain attributes of its envoys. No tensor is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ..plan import BlockPlan, RotaryPlan, TowerBlockPlan

__all__ = ["BlockFacts", "TowerFacts"]


class HeadFacts:
    """The attention's sizes, of a text block or of a tower's."""

    if TYPE_CHECKING:

        @property
        def block_plan(self) -> Any: ...

    @property
    def head_dim(self) -> int:
        """The width of one head. The text's sliding and full blocks differ."""
        return self.block_plan.head_dim

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.block_plan.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads, each serving `num_heads // num_kv_heads` query heads."""
        return self.block_plan.num_kv_heads


class BlockFacts(HeadFacts):
    """The facts of `plan.BlockPlan`, under the same names on a block, its attention and its MLP."""

    if TYPE_CHECKING:

        @property
        def block_plan(self) -> BlockPlan: ...

    @property
    def kind(self) -> Literal["sliding", "full"]:
        """`"sliding"` (a window) or `"full"` (the whole sequence)."""
        return self.block_plan.kind

    @property
    def window(self) -> int | None:
        """How many positions back a query sees, itself included; `None` on a full block."""
        return self.block_plan.window

    @property
    def rotary(self) -> RotaryPlan:
        """The rotary embedding's settings: kind, base, and how many coordinates of a head turn."""
        return self.block_plan.rotary

    @property
    def values_from_keys(self) -> bool:
        """Whether the block has no `v_proj`: its values are the keys' projection, normed."""
        return self.block_plan.values_from_keys

    @property
    def intermediate_size(self) -> int:
        """The width of the dense MLP; doubled on E2B's borrowing blocks."""
        return self.block_plan.intermediate_size

    @property
    def kv_source(self) -> int:
        """The block whose keys and values this one attends with: itself unless it borrows."""
        return self.block_plan.kv_source

    @property
    def kv_borrowers(self) -> tuple[int, ...]:
        """The blocks that borrow this one's keys and values."""
        return self.block_plan.kv_borrowers

    @property
    def borrows_keys(self) -> bool:
        """Whether the block computes no keys and values of its own."""
        return self.block_plan.borrows_keys

    @property
    def has_experts(self) -> bool:
        """Whether the block runs a mixture of experts beside its dense MLP."""
        return self.block_plan.has_experts

    @property
    def num_experts(self) -> int | None:
        """Experts of the mixture, `None` on a dense block."""
        return self.block_plan.num_experts

    @property
    def top_k(self) -> int | None:
        """Experts each token is routed to, `None` on a dense block."""
        return self.block_plan.top_k

    @property
    def expert_intermediate_size(self) -> int | None:
        """The width of one expert, `None` on a dense block."""
        return self.block_plan.expert_intermediate_size

    @property
    def per_layer_input_size(self) -> int | None:
        """The width of the block's per-layer input, `None` where it has none."""
        return self.block_plan.per_layer_input_size

    @property
    def has_per_layer_input(self) -> bool:
        """Whether the block has a per-layer branch."""
        return self.block_plan.has_per_layer_input


class TowerFacts(HeadFacts):
    """The facts of `plan.TowerBlockPlan`, under the same names on a block of a tower and its modules."""

    if TYPE_CHECKING:

        @property
        def block_plan(self) -> TowerBlockPlan: ...

    @property
    def kind(self) -> Literal["full"]:
        """`"full"`: a block of a tower has the text blocks' other kind nowhere."""
        return self.block_plan.kind

    @property
    def window(self) -> None:
        """None: a patch sees every real patch of its image; a frame of sound only a few back, by the config.

        `attention_context_left - 1` of them, itself included.
        Source: `Gemma4AudioAttention`, which takes frames in chunks; the mask of `reference.audio`.
        """
        return self.block_plan.window

    @property
    def intermediate_size(self) -> int:
        """The width of the MLP."""
        return self.block_plan.intermediate_size
