"""The index of a store: what was asked of which model, and when all is there, which shards hold it.

It is written before the first forward, without shards, and again when the last shard is there. A run that
finds one goes on with it if it is of the same harvest, and refuses the directory if it is of another.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from .. import __version__
from ..errors import BadArgument, DamagedStore
from .ranks import is_divided
from .rows import Form
from .shards import INDEX, Record, write_json
from .sources import short

__all__ = ["Index", "checksum", "model_facts", "value_facts", "versions"]

FORMAT: Final = "gemloupe store 1"
_LIBRARIES: Final = ("torch", "transformers", "nnsight", "safetensors")
_AT_ONCE: Final = 2**20
_PRIME: Final = 1_000_003
_NO_PART: Final = (
    *("_name_or_path", "transformers_version", "use_cache", "output_hidden_states", "output_attentions"),
    *("return_dict", "_attn_implementation", "_experts_implementation"),
)
"""Of a config that do not say which model it is; how attention and experts run is noted by itself."""
_CHECKSUMS: Final = {
    "weights": "its model has other weights",
    "config": "its model has another config",
    "data": "its sequences or the tokens chosen of them are others",
}


@dataclass(frozen=True)
class Index:
    """What a store holds."""

    model: dict[str, Any]
    """`name`, `revision`, `class`, `model_type`, `dtype`, checksums of the `config` and the `weights`, and
    how it runs: `attention`, `experts`, `autocast` and how many `edits` are kept on it."""
    values: dict[str, dict[str, Any]]
    """By path: the `layout` of the value, the `axes` of a row, the `block`; when complete also `dtype` and
    `shape`."""
    data: dict[str, Any]
    """`sequences`, `tokens`, `rows`, the `longest` sequence, and the `checksum` of ids and choice."""
    options: dict[str, Any]
    """How it was asked for: `positions`, `sample`, `seed`, `dtype`, `tokens_per_batch`, `shard_bytes`,
    `robust`."""
    versions: dict[str, str]
    """Of the libraries that ran."""
    processes: int = 1
    """That shared the work."""
    complete: bool = False
    shards: tuple[Record, ...] = ()
    statistics_sha256: str | None = None
    """Of `statistics.safetensors`, when complete."""
    format: str = FORMAT

    @property
    def identity(self) -> str:
        """A checksum of what was asked of which model, which every shard has in its record."""
        asked = {
            "model": {name: self.model.get(name) for name in _compared(self.model, self.model)},
            "values": {path: [facts["layout"], facts["axes"]] for path, facts in self.values.items()},
            "data": self.data,
            "options": self.options,
            "versions": {name: each for name, each in self.versions.items() if name != "python"},
        }
        return checksum([json.dumps(asked, sort_keys=True).encode()])

    def write(self, store: Path) -> None:
        """Put it in its place, whole.

        Raises: OSError.
        """
        write_json(store / INDEX, {"format": self.format, **asdict(self)})

    @classmethod
    def read(cls, store: Path) -> Index:
        """The index of a directory.

        Raises: BadArgument, where there is none; DamagedStore, where it cannot be read.
        """
        path = store / INDEX
        if not path.is_file():
            raise BadArgument(f"{store} is no store: it has no {INDEX}. `gemloupe.harvest` writes one.")
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields["format"] != FORMAT:
                raise BadArgument(
                    f"{store} is written as {fields['format']!r}; this gemloupe reads {FORMAT!r}."
                )
            return cls(**{**fields, "shards": tuple(Record.of(shard) for shard in fields["shards"])})
        except BadArgument:
            raise
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DamagedStore(
                f"the index {path} cannot be read: {error!r}. Remove it and make the same harvest again: it "
                f"finds the shards that are there."
            ) from None

    def finished(self, records: Iterable[Record], statistics_sha256: str) -> Index:
        """The index when all shards are there."""
        shards = tuple(records)
        values = {path: {**facts, **shards[0].values[path]} for path, facts in self.values.items()}
        return replace(self, values=values, shards=shards, statistics_sha256=statistics_sha256, complete=True)

    def begun(self, processes: int) -> Index:
        """The index before all shards are there."""
        values = {
            path: {name: facts[name] for name in ("layout", "axes", "block")}
            for path, facts in self.values.items()
        }
        return replace(
            self, values=values, shards=(), statistics_sha256=None, complete=False, processes=processes
        )

    def check_same(self, other: Index, store: Path) -> None:
        """Refuse to go on in a directory that holds another harvest.

        Raises: BadArgument, which names the first difference.
        """
        for what, difference in self._differences(other):
            raise BadArgument(
                f"harvest: {store} holds {what}: {difference}.\nGive another directory as `out`, or remove "
                f"this one."
            )

    def _differences(self, other: Index) -> Iterator[tuple[str, str]]:
        """What it holds instead, and in what that differs."""
        mine, theirs = self.model, other.model
        for name in _compared(mine, theirs):
            if mine.get(name) == theirs.get(name):
                continue
            yield "another model's store", _CHECKSUMS.get(name) or _apart(f"model {name}", mine, theirs, name)
        new = [path for path in self.values if path not in other.values]
        old = [path for path in other.values if path not in self.values]
        if new or old:
            parts = [f"{short(old, 80)}, which were not asked for now"] * bool(old)
            parts += [f"no {short(new, 80)}"] * bool(new)
            yield "another harvest", f"it has {' and '.join(parts)}"
        for part in ("options", "data", "versions"):
            mine, theirs = getattr(self, part), getattr(other, part)
            for name in mine | theirs:
                if name != "python" and mine.get(name) != theirs.get(name):
                    said = _CHECKSUMS["data"] if (part, name) == ("data", "checksum") else None
                    yield "another harvest", said or _apart(f"{part} {name}", mine, theirs, name)


def _apart(what: str, mine: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> str:
    return f"{what}: {short(theirs.get(name), 80)} there, {short(mine.get(name), 80)} in this call"


def value_facts(forms: Iterable[Form]) -> dict[str, dict[str, Any]]:
    """What the index says of each value before anything ran."""
    return {
        form.path: {"layout": list(form.layout.axes), "axes": list(form.axes), "block": form.block}
        for form in forms
    }


def model_facts(model: Any) -> dict[str, Any]:
    """Which model this is, and what else decides what it computes, as far as that can be seen on it."""
    module = model._module
    config = module.config
    return {
        "name": str(getattr(module, "name_or_path", "") or getattr(config, "_name_or_path", "")),
        "revision": getattr(config, "_commit_hash", None),
        "class": type(module).__name__,
        "model_type": config.model_type,
        "dtype": str(module.dtype).removeprefix("torch."),
        "attention": getattr(config, "_attn_implementation", None),
        "experts": getattr(config, "_experts_implementation", None),
        "autocast": _autocast(next(module.parameters()).device.type),
        "edits": len(model._edits),
        "config": checksum([json.dumps(_own(config.to_dict()), sort_keys=True, default=str).encode()]),
        "weights": None if is_divided(model) else _weights(module),
    }


def _compared(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """What tells two models apart; where the weights of both are known, not where they were loaded from."""
    known = mine.get("weights") is not None and theirs.get("weights") is not None
    beside = ("name", "revision") if known else ("weights",)
    return (name for name in {**mine, **theirs} if name not in beside)


def _autocast(device: str) -> str | None:
    if not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without who wrote it and what a harvest asks for itself."""
    return {
        name: _own(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _NO_PART
    }


def _weights(module: torch.nn.Module) -> str | None:
    """A checksum of all weights; `None` where some are on the disk, whose numbers are not at hand."""
    tensors = {
        name: each for name, each in sorted(module.state_dict().items()) if isinstance(each, torch.Tensor)
    }
    if any(each.is_meta for each in tensors.values()):
        return None
    return checksum(_noted(*each) for each in tensors.items())


def _noted(name: str, weight: torch.Tensor) -> bytes:
    """A weight's name, dtype and shape, and sums of its bits that depend on their order."""
    text = f"{name} {weight.dtype} {tuple(weight.shape)}"
    weight = weight.detach()
    if weight.layout != torch.strided:
        weight = weight.to_dense()
    bits = weight.contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:
        bits = bits.clone()  # eight bytes are read together
    even = len(bits) // 8 * 8
    total = 0
    for piece in (*bits[:even].view(torch.int64).split(_AT_ONCE), bits[even:].to(torch.int64)):
        if len(piece):
            place = torch.arange(1, 2 * len(piece), 2, device=piece.device)
            total = (total * _PRIME + int((piece * place).sum())) % 2**64  # torch's wrap around, too
    return f"{text} {total}".encode()


def checksum(parts: Iterable[bytes]) -> str:
    """Of several pieces, in order."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part)
    return whole.hexdigest()


def versions() -> Mapping[str, str]:
    """Of Python, of this package and of what it runs on."""
    return {"python": platform.python_version(), "gemloupe": __version__} | {
        name: version(name) for name in _LIBRARIES
    }
