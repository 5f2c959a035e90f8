"""The values of one attention, which keys a query sees, and the cases that the tests run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.core.models import Case, every_case
from tests.core.oracle import Oracle
from tests.core.places import Place

# Known at one moment, so that they may be read in any order.
CALL = (
    "attention_queries",
    "attention_keys",
    "attention_values",
    "attention_scores",
    "attention_probabilities",
    "attention_head_outputs",
)
OWN = ("own_keys", "own_values")

EXPERTS = ("batched_mm",)  # the mixture's rows do not depend on one another under it
ON_TEXT = every_case(wrapper=(False,), experts=EXPERTS)
IN_WRAPPER = every_case(
    wrapper=(True,), attention=("sdpa",), dtypes=(torch.float32,), experts=EXPERTS, batched=(True,)
)
CASES = [*ON_TEXT, *IN_WRAPPER]


def of_block(values: dict[Place, Tensor], block: int) -> dict[str, Tensor]:
    """The attention's values of one block, by name, detached."""
    return {p.name: v.detach() for p, v in values.items() if p.block == block and p.part == "self_attn"}


def sees(oracle: Oracle, block: int, mask: Tensor) -> Tensor:
    """Which keys each query sees, `[batch 1 query key]`."""
    return oracle.pattern_mask(block, mask)[:, None]


def with_heads(of_kv_heads: Tensor, heads: int) -> Tensor:
    """Keys or values once for every query head."""
    return of_kv_heads.repeat_interleave(heads // of_kv_heads.shape[1], 1)


def sources(case: Case) -> dict[int, int]:
    """Each block's lender of keys and values, itself where it has its own."""
    oracle = Oracle(case.bare())
    return {block: oracle.source(block) for block in range(oracle.blocks)}


def attention(model: Any, block: int) -> Any:
    return model.layers[block].self_attn
