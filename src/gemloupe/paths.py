"""Standard paths: `layers[3].mlp.router_logits`, as a user writes them after `model.`."""

from __future__ import annotations

import re
from typing import Any

import torch

from .errors import Unavailable, UnknownName
from .references import Reference
from .served import Served, served_values

__all__ = ["expand", "find", "is_pattern", "parse"]

_TOKEN = re.compile(r"\.?([A-Za-z_]\w*)|\[(-?\d+)\]|\.(\d+)")


def parse(path: str) -> list[str | int]:
    """The names and indices of a path; `layers.3.mlp` and `layers[3].mlp` are the same.

    Raises: UnknownName, for text that is no path.
    """
    tokens: list[str | int] = []
    at = 0
    while at < len(path):
        match = _TOKEN.match(path, at)
        if match is None:
            raise UnknownName(f"{path!r} is no path; write `layers[3].mlp.mlp_output`.")
        name, bracket, dotted = match.groups()
        tokens.append(name if name is not None else int(bracket or dotted))
        at = match.end()
    return tokens


def find(model: Any, value: str | Reference) -> tuple[Any, Served | None]:
    """The host of a path and the standard value it names there, `None` where it names a module or a fact.

    Nothing is read, inside a trace or outside one.

    Raises: UnknownName, with the nearest name; Unavailable, where a module on the way is absent.
    """
    path = str(value)
    tokens = parse(path)
    if tokens[:1] == ["model"]:
        tokens = tokens[1:]
    host: Any = model
    for place, token in enumerate(tokens):
        if isinstance(token, int):
            try:
                host = host[token]
            except (IndexError, TypeError) as error:
                raise UnknownName(f"{path}: {error}") from None
            continue
        served = served_values(type(host)).get(token)
        if served is not None:
            if place != len(tokens) - 1:
                raise UnknownName(f"{path}: {token} is a value, nothing lies under it.")
            return host, served
        if place == len(tokens) - 1 and isinstance(getattr(type(host), token, None), property):
            return host, None  # a fact, or one of nnsight's own values
        host = getattr(host, token)
    return host, None


_MANY = re.compile(r"\.\*(?=\.|$)|\[\*\]|\[(-?\d*):(-?\d*)(?::(-?\d+))?\]")


def is_pattern(value: str | Reference) -> bool:
    """Whether a path stands for several places: `layers.*`, `layers[3:9]`."""
    return _MANY.search(str(value)) is not None


def expand(model: Any, value: str | Reference) -> list[str]:
    """The places a path or pattern names, in block order.

    `layers.*.layer_output` and `layers[*].layer_output` mean every block, `layers[3:9]` blocks 3 to 8, with
    Python's meaning of a slice. A pattern leaves out the blocks that lack the value.

    Raises: UnknownName; Unavailable, for a path that is not there or a pattern that is nowhere there.
    """
    text = str(value)
    match = _MANY.search(text)
    if match is None:
        host, served = find(model, text)
        if served is None:
            raise UnknownName(f"{text} is a module or a fact, not a value.")
        reason = served.why_not(host)
        if reason is not None:
            raise Unavailable(f"{served.path_on(host)}: {reason}")
        return [served.path_on(host)]
    before, after = text[: match.start()], text[match.end() :]
    container, served = find(model, before)
    if served is not None or not isinstance(getattr(container, "_module", None), torch.nn.ModuleList):
        raise UnknownName(f"{text}: {before} is not a list of blocks.")
    start, stop, step = (int(part) if part else None for part in match.groups())
    places: list[str] = []
    refusal: Unavailable | None = None
    for index in range(*slice(start, stop, step).indices(len(container))):
        try:
            places += expand(model, f"{before}[{index}]{after}")
        except Unavailable as error:
            refusal = refusal or error
    if not places:
        if refusal is not None:
            raise refusal
        raise UnknownName(
            f"{text} names no block: the stack has {len(container)}, 0 to {len(container) - 1}."
        )
    return places
