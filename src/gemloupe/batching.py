"""Giving each invoke its own rows, and putting back only what an invoke wrote.

nnsight narrows every tensor whose first axis is the batch to an invoke's rows and, on a write, joins
the rows back together with `torch.cat`, rebuilding every container on the way. Two consequences are
mended here. A value that was read and not changed goes back as the very object the forward made, so
that a read cannot move a bit. And a module's keyword arguments keep their identity: blocks that
share keys and values do so through one mutable mapping, which a copy would cut in two.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from nnsight.intervention.batching import Batcher, BatchGroup

from .arguments import check_inputs, check_keywords

__all__ = ["StandardBatcher"]


def is_rows_of(full: torch.Tensor, start: int, size: int, rows: torch.Tensor) -> bool:
    """Whether `rows` is, in memory, the view `full.narrow(0, start, size)`."""
    if rows is full:
        return True
    if rows.requires_grad != full.requires_grad:  # detached: the rows stay, their gradient does not
        return False
    if rows.shape[1:] != full.shape[1:] or rows.shape[0] != size or rows.stride() != full.stride():
        return False
    if rows.dtype != full.dtype or rows.device != full.device or rows.layout != full.layout:
        return False
    try:
        offset = full.storage_offset() + start * (full.stride(0) if full.dim() else 0)
        shared = rows.untyped_storage()._cdata == full.untyped_storage()._cdata
        return shared and rows.storage_offset() == offset
    except (NotImplementedError, RuntimeError):  # fake and meta tensors hold no storage
        return False


class StandardBatcher(Batcher):
    """nnsight's batcher, in which what was not changed keeps its identity."""

    def add(self, *inputs: Any, **kwargs: Any) -> BatchGroup:
        check_inputs(inputs)
        return super().add(*inputs, **kwargs)

    def assemble(self, fn: Any) -> tuple:
        args, kwargs = super().assemble(fn)
        parameters = inspect.signature(self.envoy._module.forward).parameters
        if "cache" in kwargs and "past_key_values" in parameters:
            kwargs["past_key_values"] = kwargs.pop("cache")  # its name before transformers 5.24
        if getattr(fn, "__name__", "") == "_call":
            check_keywords(parameters, kwargs)
        return args, kwargs

    def widen(self, full: Any, group: BatchGroup, edited: Any) -> Any:
        if not self.batching or group is None or edited is full:
            return edited
        return self._merge(full, edited, group)

    def _merge(self, full: Any, edited: Any, group: list) -> Any:
        if isinstance(full, torch.Tensor):
            if not isinstance(edited, torch.Tensor):
                return edited
            batched = full.dim() > 0 and full.shape[0] == self.total
            if batched and is_rows_of(full, group[0], group[1], edited):
                return full
            return self._widen_tensor(full, group, edited) if batched else edited
        if isinstance(full, (list, tuple)) and isinstance(edited, (list, tuple)):
            merged = [self._merge(f, e, group) for f, e in zip(full, edited, strict=True)]
            if all(new is old for new, old in zip(merged, full, strict=True)):
                return full
            named = isinstance(full, tuple) and hasattr(full, "_fields")
            return type(full)(*merged) if named else type(full)(merged)
        if isinstance(full, dict) and isinstance(edited, dict):
            merged = {key: self._merge(full.get(key), value, group) for key, value in edited.items()}
            if merged.keys() == full.keys() and all(merged[key] is full[key] for key in full):
                return full
            # Copied, not rebuilt: a transformers `ModelOutput` keeps its type that way.
            result = full.copy()
            for key, value in merged.items():
                result[key] = value
            return result
        return edited
