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
from .media import MediaRows

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

    media: MediaRows | None = None
    """Whose media are whose, in a batch that has some."""
    at: str = ""
    """The location that is being served."""
    turn: int = 0
    """How often this run had passed it before."""

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

    def narrow(self, value: Any, group: BatchGroup) -> Any:
        if self.media is None or not self.batching or group is None:
            return super().narrow(value, group)
        return self._narrow(value, group, self.media.kind(self.at, self.turn))

    def _narrow(self, value: Any, group: list, kind: str | None) -> Any:
        """nnsight's `narrow`, where the first axis may count images, frames, sounds or their tokens."""
        if isinstance(value, torch.Tensor):
            rows = self._rows(value, group, kind)
            if rows is None:
                return value
            view = value.narrow(0, rows[0], rows[1])
            setattr(view, "_nnsight_batch", True)  # noqa: B010  # nnsight's own mark, as `_narrow_tensor` sets it
            return view
        if isinstance(value, (list, tuple)):
            parts = [self._narrow(part, group, kind) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, dict):
            result = value.copy()
            for key, part in value.items():
                result[key] = self._narrow(part, group, self._kind_at(key, kind))
            return result
        return value

    def _kind_at(self, key: str, kind: str | None) -> str | None:
        """What the first axis counts under a key: the wrapper's call has rows and media side by side."""
        if self.media is None or self.at not in self.media.calls:
            return kind
        return self.media.kind_of(key)

    def _rows(self, tensor: torch.Tensor, group: list, kind: str | None) -> tuple[int, int, int] | None:
        """Start, length and whole of an invoke's part of a tensor; `None` where it is everyone's."""
        if tensor.dim() == 0:
            return None
        if kind is not None and self.media is not None:
            return self.media.cut(kind, group, tensor.shape[0])
        return (group[0], group[1], self.total) if tensor.shape[0] == self.total else None

    def widen(self, full: Any, group: BatchGroup, edited: Any) -> Any:
        if not self.batching or group is None or edited is full:
            return edited
        return self._merge(
            full, edited, group, None if self.media is None else self.media.kind(self.at, self.turn)
        )

    def _merge(self, full: Any, edited: Any, group: list, kind: str | None) -> Any:
        if isinstance(full, torch.Tensor):
            if not isinstance(edited, torch.Tensor):
                return edited
            rows = self._rows(full, group, kind)
            if rows is None:
                return edited
            start, size, total = rows
            if is_rows_of(full, start, size, edited):
                return full
            # Joined, not written into: that keeps autograd right, and what shares the memory untouched.
            return torch.cat([full[:start], edited, full[start + size : total]])
        if isinstance(full, (list, tuple)) and isinstance(edited, (list, tuple)):
            merged = [self._merge(f, e, group, kind) for f, e in zip(full, edited, strict=True)]
            if all(new is old for new, old in zip(merged, full, strict=True)):
                return full
            named = isinstance(full, tuple) and hasattr(full, "_fields")
            return type(full)(*merged) if named else type(full)(merged)
        if isinstance(full, dict) and isinstance(edited, dict):
            merged = {
                key: self._merge(full.get(key), value, group, self._kind_at(key, kind))
                for key, value in edited.items()
            }
            if merged.keys() == full.keys() and all(merged[key] is full[key] for key in full):
                return full
            # Copied, not rebuilt: a transformers `ModelOutput` keeps its type that way.
            result = full.copy()
            for key, value in merged.items():
                result[key] = value
            return result
        return edited
