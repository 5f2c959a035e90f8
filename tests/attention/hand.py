"""The same edits by hand: the bare model, run with an attention function of the test's own.

The function edits what it is given and what it makes, in plain torch; nothing of `gemloupe` is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.attention.values import sees, with_heads
from tests.core.models import Case
from tests.core.oracle import Oracle

Edit = Callable[[Tensor], Tensor]
INPUTS = ("attention_queries", "attention_keys", "attention_values")


@dataclass
class ByHand:
    """transformers' attention function with edits, `{(block, value): edit}`."""

    case: Case
    edits: dict[tuple[int, str], Edit]
    heads: dict[int, Tensor] = field(default_factory=dict)
    """What every block's heads put out."""

    def __post_init__(self) -> None:
        self.oracle = Oracle(self.case.bare())

    def logits(self) -> Tensor:
        module = self.case.bare()
        home = sys.modules[type(self._attention(0)).__module__]
        interface = home.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.case.attention, home.eager_attention_forward
        )
        functions = mock.Mock(
            get_interface=lambda *_: lambda *args, **kwargs: self._run(interface, *args, **kwargs)
        )
        with mock.patch.object(home, "ALL_ATTENTION_FUNCTIONS", functions), torch.no_grad():
            return module(**self.case.inputs).logits

    def _attention(self, block: int) -> Any:
        root = self.case.bare().model
        return getattr(root, "language_model", root).layers[block].self_attn

    def _run(self, interface: Any, module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        block = module.layer_idx
        edited = [
            self.edits.get((block, name), lambda x: x)(x) for name, x in zip(INPUTS, args, strict=False)
        ]
        heads, weights = interface(module, *edited, *args[len(edited) :], **kwargs)
        if {(block, "attention_scores"), (block, "attention_probabilities")} & self.edits.keys():
            heads = self._mixed(block, *edited)
        self.heads[block] = self.edits.get((block, "attention_head_outputs"), lambda x: x)(heads)
        return self.heads[block], weights

    def _mixed(self, block: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys, values = (with_heads(x, queries.shape[1]) for x in (keys, values))
        scores = torch.einsum("bhqd,bhkd->bhqk", queries, keys)
        scores = scores.masked_fill(~sees(self.oracle, block, self.case.inputs["attention_mask"]), -torch.inf)
        scores = self.edits.get((block, "attention_scores"), lambda x: x)(scores)
        pattern = scores.float().softmax(-1).to(scores.dtype).nan_to_num(0.0)  # padded rows see nothing
        pattern = self.edits.get((block, "attention_probabilities"), lambda x: x)(pattern)
        return torch.einsum("bhqk,bhkd->bqhd", pattern, values)
