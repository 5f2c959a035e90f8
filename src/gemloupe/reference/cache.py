"""What decoding remembers: the keys and values of the tokens that came before."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Cache"]

KeysOrValues = Float[Tensor, "batch kv_heads key head_dim"]


@dataclass
class Cache:
    """The keys and values of every token so far; a forward that is given one appends to it.

        cache = Cache()
        prompt = forward(config, state, tokens, cache=cache)
        step = forward(config, state, next_token, cache=cache)

    Sliding blocks keep all of theirs too, so that keys stand at their absolute places; their mask hides
    what the window has passed. Borrowing blocks keep none.
    """

    attention_mask: Int[Tensor, "batch key"] | None = None
    keys: dict[int, KeysOrValues] = field(default_factory=dict)
    values: dict[int, KeysOrValues] = field(default_factory=dict)

    def see(self, attention_mask: Int[Tensor, "batch seq"]) -> Int[Tensor, "batch key"]:
        """Append the mask of the new tokens; the mask of all."""
        parts = [mask for mask in (self.attention_mask, attention_mask) if mask is not None]
        self.attention_mask = torch.cat(parts, -1)
        return self.attention_mask

    def extend(
        self, index: int, keys: KeysOrValues, values: KeysOrValues
    ) -> tuple[KeysOrValues, KeysOrValues]:
        """Append block `index`'s keys and values of the new tokens; those of all tokens."""
        if index in self.keys:
            keys = torch.cat([self.keys[index], keys], -2)
            values = torch.cat([self.values[index], values], -2)
        self.keys[index], self.values[index] = keys, values
        return keys, values

    def of(self, index: int) -> tuple[KeysOrValues, KeysOrValues]:
        """Block `index`'s keys and values of all tokens."""
        return self.keys[index], self.values[index]
