"""How far a model's value lies from the reference's, and how far it may."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool
from torch import Tensor

from ..layouts import Layout
from .looks import Look, Seen
from .names import place

__all__ = ["FLOOR", "MARGIN", "Difference", "choices", "compared", "rounding_of"]

FLOOR: Final[dict[Look, float]] = {"step": 2e-5, "block": 2e-5, "whole": 2e-4}
"""What float32 may cost, in units of a value's scale: in every precision transformers' norms, its router's
softmax and its rotary tables are float32."""

MARGIN: Final = 4.0
"""How many times what one rounding of every value does is allowed: on its way from the one before it a value
is rounded up to six times (a query: projection, norm, cosine and sine, two products, their sum), and what
is measured is one draw of the roundings while the model makes another."""


TOKEN: Final = 4.0
"""How many times more is allowed of a single token, in units of its own scale, on which the draws weigh more.
Without it one token of massive values, as BOS often is, would hide what all others lack."""
TOKEN_FLOOR: Final = 10.0
"""Likewise of the floor."""


@dataclass(frozen=True)
class Difference:
    """The difference of one value by one look, over the real tokens of one forward or of a part of it."""

    look: Look
    absolute: float
    """The largest difference of two numbers; infinite where shapes differ, or one is hidden and one seen."""
    scale: float
    """The largest magnitude in the reference's value."""
    moved: float
    """How far a shaken value lies from the exact one, at most."""
    rounding: float
    """The most by which a number changes in the model's precision, relative to it."""

    def __or__(self, other: Difference) -> Difference:
        """The difference over the tokens of both."""
        if not (self.held and other.held):
            return self if self.excess >= other.excess else other
        return Difference(
            self.look,
            _larger(self.absolute, other.absolute),
            _larger(self.scale, other.scale),
            _larger(self.moved, other.moved),
            self.rounding,
        )

    @property
    def relative(self) -> float:
        """The largest difference in units of the scale."""
        return _ratio(self.absolute, self.scale)

    @property
    def tolerance(self) -> float:
        """The largest relative difference that the model's precision explains."""
        explained = MARGIN * (_ratio(self.moved, self.scale) + self.rounding)
        return max(FLOOR[self.look], explained) if math.isfinite(explained) else FLOOR[self.look]

    @property
    def held(self) -> bool:
        """Whether the difference is within the tolerance; one that is no number is not."""
        return self.relative <= self.tolerance

    @property
    def excess(self) -> float:
        """The difference in units of the tolerance, infinite where it is no number."""
        excess = self.relative / self.tolerance
        return math.inf if math.isnan(excess) else excess


def rounding_of(dtypes: Iterable[torch.dtype]) -> float:
    """The most by which a number changes when it is rounded to the coarsest of these, relative to it.

    2**-24 for float32, 2**-11 for float16, 2**-8 for bfloat16.
    """
    return max(torch.finfo(dtype).eps / 2 for dtype in dtypes)


def compared(seen: Seen, layout: Layout, real: Bool[Tensor, "batch seq"], rounding: float) -> Difference:
    """The difference of one value, over the real tokens of `seen.positions`.

    The tolerance is `max(FLOOR, MARGIN * (moved + rounding))`: `moved` is how far the shaken value lies from
    the exact one, in units of the scale, and `rounding` the value's own. By step and by block each token is
    held to its own scale as well, see `TOKEN`; where one is not, the difference is that token's. Scores are
    compared where they are seen, whole numbers bit by bit. `expert_indices` are to be given as
    probabilities, see `choices`.
    """
    here = real[:, seen.positions]
    served, exact, *shaken = (_by_token(layout, of, here) for of in (seen.served, seen.exact, *seen.shaken))
    served = served.to(exact.device)

    def difference(absolute: float, moved: float = 0.0) -> Difference:
        scale = _largest(exact) if exact.is_floating_point() else 1.0
        return Difference(seen.look, absolute, scale, moved, rounding)

    if served.shape != exact.shape:
        return difference(math.inf)
    if not exact.is_floating_point():
        return difference(0.0 if torch.equal(served.to(exact.dtype), exact) else math.inf)
    if seen.name.endswith("attention_scores"):
        # What is hidden is -inf, and under eager attention the least number of the precision.
        hidden = exact == -torch.inf
        agree = torch.equal(served <= torch.finfo(served.dtype).min / 2, hidden)
        served, exact, *shaken = (of.masked_fill(hidden, 0) for of in (served, exact, *shaken))
        if not agree:
            return difference(math.inf)
    whole = difference(_largest(served - exact), max(_largest(of - exact) for of in shaken))
    if not whole.held or not exact.numel() or seen.look == "whole":
        return whole  # by which a single token of bfloat16 may be off by its own scale
    absolute, scale = _largest_of_each(served - exact), _largest_of_each(exact)
    moved = torch.stack([_largest_of_each(of - exact) for of in shaken]).amax(0)
    explained = TOKEN * MARGIN * (moved + rounding * scale)
    excess = absolute - torch.maximum(explained, TOKEN_FLOOR * FLOOR[seen.look] * scale)
    worst = int(excess.argmax())
    if excess[worst] <= 0:
        return whole
    return Difference(seen.look, float(absolute[worst]), float(scale[worst]), float(moved[worst]), rounding)


def choices(seen: Iterable[Seen]) -> Iterable[Seen]:
    """The same, each choice of experts given as the probabilities of the chosen ones, in their order.

    Of two experts that all but tie either may be chosen: what a wrong choice costs is what the right one has
    over it. An expert that does not exist has a probability of minus infinity.
    """
    chances: dict[tuple[Look, str], Seen] = {}
    for one in seen:
        block, value = place(one.name)
        if value == "mlp.router_probabilities":
            chances[one.look, f"layers[{block}].mlp.expert_indices"] = one
        if (chance := chances.get((one.look, one.name))) is None:
            yield one
            continue
        chances_of = (chance.exact, *chance.shaken)
        if one.look == "step":
            own = chance.served.to(chance.exact)
            chances_of = (own,) * len(chances_of)
        chosen = one.served.to(chance.exact.device)
        exists = (chosen >= 0) & (chosen < chance.exact.shape[-1])
        given = chances_of[0].gather(-1, chosen.where(exists, 0)).masked_fill(~exists, -torch.inf)
        best, *moved = (of.topk(chosen.shape[-1], -1).values for of in chances_of)
        yield Seen(one.look, one.name, given, best, tuple(moved), one.positions)


def _by_token(layout: Layout, value: Tensor, real: Bool[Tensor, "batch seq"]) -> Tensor:
    """A value's rows on real tokens, `[tokens ...]`; all of a value that has none for each token.

    Of a tower's values they are those of all patches and frames: padded ones run through every block too.
    """
    if layout.axes[0] != "batch":
        rows = [axis for axis in ("patches", "frames", "query", "key") if axis in layout.axes]
        return value.movedim(layout.axis(rows[0]), 1).flatten(0, 1) if rows else value
    axes = [axis for axis in ("seq", "query", "key") if axis in layout.axes]
    if not axes or value.shape[layout.axis(axes[0])] != real.shape[1]:
        return value
    rows = value.movedim(layout.axis(axes[0]), 1)
    return rows.flatten(0, 1) if bool(real.all()) else rows[real.to(value.device)]


def _largest_of_each(value: Tensor) -> Tensor:
    """The largest magnitude of each token, `[tokens]`."""
    return value.abs().flatten(1).amax(1) if value.dim() > 1 else value.abs()


def _largest(value: Tensor) -> float:
    """The largest magnitude; not a number, if one is none."""
    if not value.numel():
        return 0.0
    # Unlike the maximum of the magnitudes this makes no second tensor.
    low, high = value.aminmax()
    return _larger(abs(float(low)), abs(float(high)))


def _larger(one: float, other: float) -> float:
    return one if math.isnan(one) else other if math.isnan(other) else max(one, other)


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return math.inf if part else 0.0
