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
from .shards import Record, write_json

__all__ = ["FILE", "Index", "checksum", "model_facts", "value_facts", "versions"]

FILE: Final = "index.json"
FORMAT: Final = "gemloupe store 1"
_LIBRARIES: Final = ("torch", "transformers", "nnsight", "safetensors")
_SAMPLED: Final = 16
"""Numbers of each weight that tell two models of one shape apart."""


@dataclass(frozen=True)
class Index:
    """What a store holds."""

    model: dict[str, Any]
    """`name`, `revision`, `class`, `model_type`, `dtype`, and checksums of the `config` and of some
    `weights`."""
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
    format: str = FORMAT

    def write(self, store: Path) -> None:
        """Put it in its place, whole.

        Raises: OSError.
        """
        write_json(store / FILE, {"format": self.format, **asdict(self)})

    @classmethod
    def read(cls, store: Path) -> Index:
        """The index of a directory.

        Raises: BadArgument, where there is none; DamagedStore, where it cannot be read.
        """
        path = store / FILE
        if not path.is_file():
            raise BadArgument(f"{store} is no store: it has no {FILE}. `gemloupe.harvest` writes one.")
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
            raise DamagedStore(f"the index {path} cannot be read: {error!r}.") from None

    def finished(self, records: Iterable[Record]) -> Index:
        """The index when all shards are there."""
        shards = tuple(records)
        values = {path: {**facts, **shards[0].values[path]} for path, facts in self.values.items()}
        return replace(self, values=values, shards=shards, complete=True)

    def check_same(self, other: Index, store: Path) -> None:
        """Refuse to go on in a directory that holds another harvest.

        Raises: BadArgument, which names the first difference.
        """
        for part, asked, there in self._differences(other):
            what = "another model's store" if part.startswith("model") else "another harvest"
            raise BadArgument(
                f"harvest: {store} holds {what}: its {part} is {_short(there)}, and this call's is "
                f"{_short(asked)}.\nGive another directory as `out`, or remove this one."
            )

    def _differences(self, other: Index) -> Iterator[tuple[str, Any, Any]]:
        for part in ("model", "values", "options", "data", "versions"):
            mine, theirs = getattr(self, part), getattr(other, part)
            if part == "values":
                mine, theirs = list(mine), list(theirs)
                new, old = set(mine) - set(theirs), set(theirs) - set(mine)
                if new or old:
                    yield "list of values", sorted(new) or "without them", sorted(old) or "without them"
                continue
            for name in mine | theirs:
                if mine.get(name) != theirs.get(name):
                    yield f"{part} {name}", mine.get(name), theirs.get(name)


def _short(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) <= 80 else f"{text[:77]}..."


def value_facts(forms: Iterable[Form]) -> dict[str, dict[str, Any]]:
    """What the index says of each value before anything ran."""
    return {
        form.path: {"layout": list(form.layout.axes), "axes": list(form.axes), "block": form.block}
        for form in forms
    }


def model_facts(model: Any) -> dict[str, Any]:
    """Which model this is: its names, and checksums that tell it from another under the same name."""
    module = model._module
    config = module.config
    named = config.to_dict()
    # Who wrote it and how it is run is not which model it is.
    own = {
        name: value for name, value in named.items() if name not in ("_name_or_path", "transformers_version")
    }
    return {
        "name": str(getattr(module, "name_or_path", "") or getattr(config, "_name_or_path", "")),
        "revision": getattr(config, "_commit_hash", None),
        "class": type(module).__name__,
        "model_type": config.model_type,
        "dtype": str(module.dtype).removeprefix("torch."),
        "attention": getattr(config, "_attn_implementation", None),
        "config": checksum([json.dumps(own, sort_keys=True, default=str).encode()]),
        # Processes that hold one model between them have a slice each.
        "weights": None
        if is_divided(model)
        else checksum(_some_of(*each) for each in module.named_parameters()),
    }


def _some_of(name: str, weight: torch.Tensor) -> bytes:
    """A weight's name, shape and first numbers; of one that was moved to the disk no numbers."""
    text = f"{name} {tuple(weight.shape)}".encode()
    if weight.is_meta:
        return text
    some = weight.detach().reshape(-1)[:_SAMPLED].cpu().contiguous()
    return text + some.view(torch.uint8).numpy().tobytes()


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
