"""The reference beside a model that runs: three looks at every value, and how far rounding alone carries it.

A look says what the reference computes a value from:

    step     the model's own values just before it: what is wrong is wrong here, and not before
    block    the model's own stream that enters the block: errors of earlier blocks do not pile up
    whole    the token ids: what the whole computation comes to

Each look computes exactly and, a few times, shaken: every value off by one rounding of the model's
precision, up or down at random, before the next one reads it. How far a shaken value lies from the exact one
is what that precision explains there, whatever the steps between do with an error: a norm after a branch of
all but nothing makes it large.

The experts are the model's own choice in every look: of two that all but tie rounding may take either, and
all that follows is another number then. The choice itself is compared by `compare.choices`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from ..layouts import Residual, Tokens
from ..plan import ModelPlan
from .forward import head, parts
from .media import Media
from .names import place
from .ops import softmax
from .steps import SINGLE, taken
from .weights import Weights

__all__ = ["LOOKS", "MEANINGS", "Look", "Looks", "Seen"]

Look = Literal["step", "block", "whole"]
LOOKS: Final[tuple[Look, ...]] = get_args(Look)
MEANINGS: Final[dict[Look, str]] = {
    "step": "from the model's own values just before it",
    "block": "from the model's own stream entering the block",
    "whole": "from the token ids, end to end",
}
"""What the reference computes a value from, by each look."""

# How many draws of the roundings each look takes: the more steps between, the more is luck in what one does.
_DRAWS: Final[dict[Look, int]] = {"step": 2, "block": 3, "whole": 3}

# Of the positions of a forward, so many are answered at a time: a vocabulary of logits is large.
_POSITIONS: Final = 64

# What a model does in float32 is rounded twice: a frequency, say, and then its product with the position.
_SINGLE: Final = 2**-23

# What the look at a block takes from the model beside the experts, and what a borrowing block borrows.
_ENTRANCES: Final = frozenset(
    {"token_embeddings", "per_layer_inputs", "layer_input", "per_layer_input", "layer_output"}
    | {"image_features", "video_features", "audio_features"}
)
_BORROWED: Final = frozenset({"attention_keys", "attention_values"})


@dataclass(frozen=True)
class Seen:
    """One value of a model, and the same by the reference."""

    look: Look
    name: str
    served: Tensor
    exact: Tensor
    shaken: tuple[Tensor, ...]
    """Each draw of the roundings."""
    positions: slice
    """Which of the forward's positions these are, where the value has one for each."""


class Looks:
    """The reference, run beside one forward of a model, part by part.

        looks = Looks(weights, input_ids, attention_mask, rounding=2**-8)
        for part in (inputs, entrance, *blocks, answers):   # what the model serves, by standard name
            for seen in looks.at(part): ...

    The parts are those of `parts`; a value that the model does not serve may be missing from its part, and
    what follows from it is computed from the reference's own. Of a part that has been passed nothing is
    kept but the streams and what is still to be borrowed.

    rounding: the most by which a value changes when it is rounded to the model's precision, relative to it.
    images, media: as for `parts`.

    Raises: as `parts`.
    """

    def __init__(
        self,
        weights: Weights,
        input_ids: Tokens,
        attention_mask: Tokens,
        *,
        rounding: float,
        images: Tokens | None = None,
        media: Media | None = None,
    ) -> None:
        self._rounding = rounding
        self._tracks: dict[Look, list[_Track]] = {}
        for look, draws in _DRAWS.items():
            noises = (0.0, *(rounding for _ in range(draws)))
            self._tracks[look] = [_Track(look, weights, noise, seed) for seed, noise in enumerate(noises)]
            for track in self._tracks[look]:
                track.run(input_ids, attention_mask, images, media)

    def at(self, served: Mapping[str, Tensor]) -> Iterator[Seen]:
        """Every value of the next part, by each look."""
        for look, tracks in self._tracks.items():
            for (positions, exact), *shaken in zip(*(track.at(served) for track in tracks), strict=True):
                draws = [found for _, found in shaken]
                if "next_token_probs" in exact:
                    for found in draws:
                        pushed = _pushed(exact["logits"], found["logits"], self._rounding)
                        found["next_token_probs"] = pushed
                for name, value in exact.items():
                    if name in served:
                        theirs = _cut(name, served[name], positions)
                        yield Seen(
                            look, name, theirs, value, tuple(found[name] for found in draws), positions
                        )


class _Track:
    """One run of the reference: by one look, exactly or shaken."""

    def __init__(self, look: Look, weights: Weights, noise: float, seed: int) -> None:
        self._look: Look = look
        self._weights = weights
        self._noise = noise
        self._random = torch.Generator(weights.device).manual_seed(seed)
        self._served: Mapping[str, Tensor] = {}
        self._stream: Residual | None = None
        self._parts: Iterator[dict[str, Tensor]] = iter(())
        self._leaving = f"layers[{weights.plan.num_layers - 1}].layer_output"

    def run(
        self, input_ids: Tokens, attention_mask: Tokens, images: Tokens | None, media: Media | None
    ) -> None:
        """Begin a forward, nothing of which is computed before it is asked for."""
        self._parts = parts(
            self._weights, input_ids, attention_mask, images=images, media=media, given=self._next
        )

    def at(self, served: Mapping[str, Tensor]) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """The values of the next part; those of the head a few positions at a time."""
        self._served = served
        if self._stream is None:
            found = next(self._parts)
            if self._leaving in found:
                self._stream = taken(self._next, self._leaving, found[self._leaving])
            yield slice(None), found
        else:
            length = self._stream.shape[1]
            for start in range(0, length, _POSITIONS):
                positions = slice(start, min(start + _POSITIONS, length))
                self._served = {name: _cut(name, value, positions) for name, value in served.items()}
                found = head(self._weights, self._stream[:, positions], given=self._next)
                if positions.stop < length:
                    del found["next_token_probs"]
                yield positions, found
        self._served = {}

    def _next(self, name: str, value: Tensor) -> Tensor:
        served = self._served.get(name)
        if served is not None and self._takes(name) and _is_possible(self._weights.plan, name, served):
            value = self._weights.real(served)
        if not self._noise or not value.is_floating_point():
            return value
        return value * (1 + (_SINGLE if name == SINGLE else self._noise) * self._signs(value.shape))

    def _signs(self, shape: torch.Size) -> Tensor:
        """One or minus one at random, alike in all rows of a batch and in all heads: numbers are dear."""
        signs = torch.empty(shape[-2:], dtype=torch.float64, device=self._weights.device)
        return signs.bernoulli_(0.5, generator=self._random).mul_(2).sub_(1)

    def _takes(self, name: str) -> bool:
        block, value = place(name)
        value = value.rpartition(".")[2]
        if self._look == "step" or value == "expert_indices":
            return True
        if self._look == "whole":
            return False
        if block is None or value not in _BORROWED or not name.startswith("layers"):
            return value in _ENTRANCES
        return self._weights.plan.blocks[block].borrows_keys


def _is_possible(plan: ModelPlan, name: str, served: Tensor) -> bool:
    """Whether the reference can go on with a value of the model's: with any but experts that do not exist."""
    if not name.endswith("expert_indices"):
        return True
    experts = plan.blocks[place(name)[0] or 0].num_experts or 0
    return bool(served.min() >= 0) and bool(served.max() < experts)


def _cut(name: str, value: Tensor, positions: slice) -> Tensor:
    return value if name == "next_token_probs" or positions == slice(None) else value[:, positions]


def _pushed(logits: Tensor, shaken: Tensor, rounding: float) -> Tensor:
    """The next token's distribution with the likeliest logit as high as errors take it, and the others low.

    A row's distribution hangs on so few logits that signs drawn at random often cancel.
    """
    last = logits[:, -1]
    off = ((shaken[:, -1] - last).abs() + rounding * last.abs()).amax(-1, keepdim=True)
    likeliest = last == last.amax(-1, keepdim=True)
    return softmax(torch.where(likeliest, last + off, last - off))
