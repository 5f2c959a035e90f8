"""Standard paths: `layers[3].mlp.router_logits`, as a user writes them after `model.`."""

from __future__ import annotations

import re
from typing import Any

from .errors import UnknownName
from .references import Reference
from .served import Served, served_values

__all__ = ["find", "parse"]

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
