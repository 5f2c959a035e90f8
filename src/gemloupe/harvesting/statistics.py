"""Mean, variance and norms of every value, added up in float64 while rows are written.

Rows are taken as they are stored. Two sums are merged by Chan's rule (Chan, Golub and LeVeque 1979; of one
row it is Welford's), so that statistics of shards make up those of the whole store, in any order up to
rounding.

The robust option adds what a mean hides. A *massive activation* is a number above 100 in magnitude and
above 1000 times the median magnitude of its row (Sun et al. 2024, "Massive Activations in Large Language
Models"). An *outlier dimension* is one whose root mean square is six times the median dimension's or more.
`ordinary_mean` and `ordinary_variance` leave out the rows that hold a massive activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod
from typing import Final

import torch

from ..errors import UnknownName
from ..references import Reference

__all__ = ["Massive", "Moments", "Statistics", "Sums", "ValueStatistics", "merged"]

_AT_ONCE: Final = 2**19
"""Numbers that are taken to float64 together: four megabytes."""
_MASSIVE: Final = 100.0
_ABOVE_MEDIAN: Final = 1000.0
_LISTED: Final = 64
"""Massive activations that are kept with their place; all are counted."""
_OUTLIER: Final = 6.0


class Moments:
    """Count, mean and summed squared deviation of rows, `[width]` each, float64."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.mean = torch.zeros(width, dtype=torch.float64)
        self.m2 = torch.zeros(width, dtype=torch.float64)

    def add(self, rows: torch.Tensor) -> None:
        """Rows `[rows width]`, float64."""
        if len(rows):
            variance, mean = torch.var_mean(rows, 0, correction=0)
            self.merge(len(rows), mean, variance * len(rows))

    def merge(self, count: int, mean: torch.Tensor, m2: torch.Tensor) -> None:
        """The moments of other rows."""
        if not count:
            return
        total = self.count + count
        apart = mean - self.mean
        self.m2 = self.m2 + m2 + apart.square() * (self.count * count / total)
        self.mean = self.mean + apart * (count / total)
        self.count = total


class Sums:
    """What is added up of one value."""

    def __init__(self, shape: tuple[int, ...], *, robust: bool) -> None:
        self.shape = shape
        self.robust = robust
        width = prod(shape)
        self.all, self.norm = Moments(width), Moments(1)
        self.norm_min, self.norm_max = torch.inf, -torch.inf
        self.ordinary = Moments(width) if robust else None
        self.massive_count = 0
        # sequence, position, place in the flat row
        self.massive_at = torch.zeros(0, 3, dtype=torch.int64)
        self.massive_values = torch.zeros(0, dtype=torch.float64)

    def add(self, rows: torch.Tensor, sequences: torch.Tensor, positions: torch.Tensor) -> bool:
        """Take rows `[rows ...]` in. Returns whether all their numbers are finite; the sums are spoilt if
        not."""
        rows = rows.reshape(len(rows), -1)
        step = max(1, _AT_ONCE // max(rows.shape[1], 1))
        for start in range(0, len(rows), step):
            some = rows[start : start + step].to(torch.float64)
            norms = torch.linalg.vector_norm(some, dim=1)
            if not bool(torch.isfinite(norms).all()):
                return False
            self.all.add(some)
            self.norm.add(norms[:, None])
            self.norm_min = min(self.norm_min, float(norms.min()))
            self.norm_max = max(self.norm_max, float(norms.max()))
            if self.ordinary is not None:
                spoilt = self._note_massive(
                    some, sequences[start : start + step], positions[start : start + step]
                )
                self.ordinary.add(some[~spoilt])
        return True

    def _note_massive(
        self, rows: torch.Tensor, sequences: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Keep the massive activations; which rows hold one, `[rows]`."""
        size = rows.abs()
        large = (size > _MASSIVE).any(1)
        found = torch.zeros_like(size, dtype=torch.bool)
        if bool(large.any()):  # the median is dear
            median = size[large].median(1, keepdim=True).values
            found[large] = (size[large] > _MASSIVE) & (size[large] > _ABOVE_MEDIAN * median)
        row, dimension = found.nonzero(as_tuple=True)
        at = torch.stack([sequences[row].long(), positions[row].long(), dimension], 1)
        self.merge_massive(len(row), at, rows[row, dimension])
        return found.any(1)

    def merge_massive(self, count: int, at: torch.Tensor, values: torch.Tensor) -> None:
        """Massive activations of other rows; the largest are kept, of equals those of earlier sequences."""
        if not count:
            return
        self.massive_count += count
        at, values = torch.cat([self.massive_at, at]), torch.cat([self.massive_values, values])
        for column in (2, 1, 0):
            order = torch.argsort(at[:, column], stable=True)
            at, values = at[order], values[order]
        order = torch.argsort(values.abs(), descending=True, stable=True)[:_LISTED]
        self.massive_at, self.massive_values = at[order], values[order]

    def merge(self, other: Sums) -> None:
        """The sums of other rows."""
        self.all.merge(other.all.count, other.all.mean, other.all.m2)
        self.norm.merge(other.norm.count, other.norm.mean, other.norm.m2)
        self.norm_min, self.norm_max = (
            min(self.norm_min, other.norm_min),
            max(self.norm_max, other.norm_max),
        )
        if self.ordinary is not None and other.ordinary is not None:
            self.ordinary.merge(other.ordinary.count, other.ordinary.mean, other.ordinary.m2)
            self.merge_massive(other.massive_count, other.massive_at, other.massive_values)

    # -- as tensors ------------------------------------------------------------------------------

    def tensors(self, path: str) -> dict[str, torch.Tensor]:
        """The sums as a file keeps them, under the value's path."""
        kept = {
            "shape": torch.tensor(self.shape, dtype=torch.int64),
            **_of_moments("", self.all),
            **_of_moments("norm_", self.norm),
            "norm_range": torch.tensor([self.norm_min, self.norm_max], dtype=torch.float64),
        }
        if self.ordinary is not None:
            kept |= _of_moments("ordinary_", self.ordinary)
            kept["massive_count"] = torch.tensor([self.massive_count])
            kept |= {"massive_at": self.massive_at, "massive_values": self.massive_values}
        return {f"{path}/{name}": tensor.contiguous() for name, tensor in kept.items()}

    @classmethod
    def of_tensors(cls, path: str, kept: Mapping[str, torch.Tensor]) -> Sums:
        """The sums that `tensors` gave."""
        own = {
            name.removeprefix(f"{path}/"): t.clone()
            for name, t in kept.items()
            if name.startswith(f"{path}/")
        }
        sums = cls(tuple(own["shape"].tolist()), robust="massive_count" in own)
        _to_moments("", sums.all, own)
        _to_moments("norm_", sums.norm, own)
        sums.norm_min, sums.norm_max = own["norm_range"].tolist()
        if sums.ordinary is not None:
            _to_moments("ordinary_", sums.ordinary, own)
            sums.massive_count = int(own["massive_count"])
            sums.massive_at, sums.massive_values = own["massive_at"], own["massive_values"]
        return sums


def merged(parts: list[Mapping[str, torch.Tensor]]) -> dict[str, Sums]:
    """The sums of several files, by path."""
    total: dict[str, Sums] = {}
    for part in parts:
        for path in sorted({name.rpartition("/")[0] for name in part}):
            sums = Sums.of_tensors(path, part)
            if path in total:
                total[path].merge(sums)
            else:
                total[path] = sums
    return total


def _of_moments(prefix: str, moments: Moments) -> dict[str, torch.Tensor]:
    count = torch.tensor([moments.count])
    return {f"{prefix}count": count, f"{prefix}mean": moments.mean, f"{prefix}m2": moments.m2}


def _to_moments(prefix: str, moments: Moments, kept: Mapping[str, torch.Tensor]) -> None:
    moments.count = int(kept[f"{prefix}count"])
    moments.mean, moments.m2 = kept[f"{prefix}mean"], kept[f"{prefix}m2"]


# ---- what a reader gets ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Massive:
    """A massive activation: where it is and how large."""

    sequence: int
    position: int
    dimension: tuple[int, ...]
    """Its place in the row."""
    value: float


@dataclass(frozen=True)
class ValueStatistics:
    """Statistics of one value over all rows of a store. Tensors are float64 and of a row's shape."""

    count: int
    """Rows."""
    mean: torch.Tensor
    variance: torch.Tensor
    """Of the population: divided by the number of rows."""
    norm_mean: float
    """Of the rows' Euclidean norms, as the next three."""
    norm_std: float
    norm_min: float
    norm_max: float
    ordinary_count: int | None = None
    """Rows without a massive activation; this and all below `None` unless the harvest was robust."""
    ordinary_mean: torch.Tensor | None = None
    ordinary_variance: torch.Tensor | None = None
    massive_count: int | None = None
    """How many massive activations there are."""
    massive: tuple[Massive, ...] | None = None
    """The largest of them, largest first."""
    outliers: tuple[tuple[int, ...], ...] | None = None
    """Places in the row whose root mean square is six times the median place's or more, largest first."""

    @property
    def std(self) -> torch.Tensor:
        """The square root of the variance."""
        return self.variance.sqrt()

    @classmethod
    def of(cls, sums: Sums) -> ValueStatistics:
        """The statistics that sums amount to."""
        count = max(sums.all.count, 1)
        plain = cls(
            count=sums.all.count,
            mean=sums.all.mean.reshape(sums.shape),
            variance=(sums.all.m2 / count).reshape(sums.shape),
            norm_mean=float(sums.norm.mean),
            norm_std=float((sums.norm.m2 / count).sqrt()),
            norm_min=sums.norm_min,
            norm_max=sums.norm_max,
        )
        if sums.ordinary is None:
            return plain
        listed = zip(sums.massive_at.tolist(), sums.massive_values.tolist(), strict=True)
        return replace(
            plain,
            ordinary_count=sums.ordinary.count,
            ordinary_mean=sums.ordinary.mean.reshape(sums.shape),
            ordinary_variance=(sums.ordinary.m2 / max(sums.ordinary.count, 1)).reshape(sums.shape),
            massive_count=sums.massive_count,
            massive=tuple(Massive(s, p, _place(d, sums.shape), value) for (s, p, d), value in listed),
            outliers=_outliers(sums, count),
        )


class Statistics(Mapping[str, ValueStatistics]):
    """The statistics of a store by value: `statistics["layers[3].layer_output"].mean`."""

    def __init__(self, found: dict[str, ValueStatistics], harvested: tuple[str, ...]) -> None:
        self._found = found
        self._harvested = harvested

    def __getitem__(self, value: str | Reference) -> ValueStatistics:
        """Of one value.

        Raises: UnknownName, which says whether it was harvested.
        """
        path = str(value)
        if path in self._found:
            return self._found[path]
        if path in self._harvested:
            raise UnknownName(
                f"{path} has no statistics: whole numbers and masks have no mean worth a name, and scores of "
                f"hidden keys are minus infinity."
            )
        near = get_close_matches(path, self._found, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise UnknownName(f"{path} was not harvested; there are statistics of {', '.join(self)}.{meant}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"<statistics of {', '.join(self) or 'no value'}>"


def _outliers(sums: Sums, count: int) -> tuple[tuple[int, ...], ...]:
    size = (sums.all.mean.square() + sums.all.m2 / count).sqrt()
    if len(size) < 2:
        return ()
    found = ((size >= _OUTLIER * size.median()) & (size > 0)).nonzero().flatten()
    order = torch.argsort(size[found], descending=True, stable=True)
    return tuple(_place(flat, sums.shape) for flat in found[order].tolist())


def _place(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(at) for at in torch.unravel_index(torch.tensor(flat), shape))
