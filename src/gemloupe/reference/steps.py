"""The values of a computation as it is made, by name, any of which can be replaced in what follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from torch import Tensor

__all__ = ["SINGLE", "Given", "Steps", "taken"]

SINGLE: Final = "float32"
"""What a given function is told, in place of a name, of what every model computes in float32."""

Given = Mapping[str, Tensor] | Callable[[str, Tensor], Tensor]
"""What the next step reads in place of a computed value: values by name, or a function that is told the name
and the value and answers with the value to read."""


def taken(given: Given | None, name: str, value: Tensor) -> Tensor:
    """What is read next, where `value` was computed under `name`."""
    if given is None:
        return value
    return given.get(name, value) if isinstance(given, Mapping) else given(name, value)


class Steps:
    """Notes each value under its name, and says what the next step is to read.

        steps = Steps("layers[3].", given, real)
        middle = steps("mid_stream", stream + attention_output)

    `found` holds the values as they were computed, in order.

    given: what is read in place of what was computed; see `Given`.
    real: brings a given value to where the computation is, in its precision.
    """

    def __init__(self, prefix: str, given: Given | None, real: Callable[[Tensor], Tensor]) -> None:
        self.found: dict[str, Tensor] = {}
        self._prefix = prefix
        self._given = given
        self._real = real

    def between(self, value: Tensor, told: str = "") -> Tensor:
        """What is read next of a value that has no name, of which a given function is told `told`."""
        return self._following(told, value)

    def __call__(self, name: str, value: Tensor) -> Tensor:
        name = self._prefix + name
        self.found[name] = value
        return self._following(name, value)

    def _following(self, name: str, value: Tensor) -> Tensor:
        following = taken(self._given, name, value)
        return value if following is value else self._real(following)
