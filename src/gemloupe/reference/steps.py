"""The values of a computation as it is made, by name, any of which can be given instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

__all__ = ["Steps"]


class Steps:
    """Notes each value under its name, and says what the next step is to read.

        steps = Steps("layers[3].", given, real)
        middle = steps("mid_stream", stream + attention_output)

    What is read next is the value itself or, where `given` has one under that name, that one. `found` holds
    the values as they were computed, in order.

    real: brings a given value to where the computation is, in its precision.
    """

    def __init__(
        self, prefix: str, given: Mapping[str, Tensor] | None, real: Callable[[Tensor], Tensor]
    ) -> None:
        self.found: dict[str, Tensor] = {}
        self._prefix = prefix
        self._given = given or {}
        self._real = real

    def __call__(self, name: str, value: Tensor) -> Tensor:
        name = self._prefix + name
        self.found[name] = value
        return self._real(self._given[name]) if name in self._given else value
