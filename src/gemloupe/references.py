"""What a value's name is where no forward is running: a reference to it.

A reference says where the value is, in which layout, and what it means. Functions that take values
(`has`, `why_not`, `steer(at=...)`) take it in place of a path. Anything that would need the tensor
itself raises `OutsideTrace` with the line to write instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from .errors import OutsideTrace

if TYPE_CHECKING:
    from .layouts import Layout

__all__ = ["Reference"]


@dataclass(frozen=True)
class Reference:
    """A standard value, by name: `path`, `layout`, `meaning`, and whether it can be written."""

    path: str
    layout: Layout
    meaning: str
    writable: bool

    def __repr__(self) -> str:
        return f"<{self.path} {self.layout}: {self.meaning}>"

    def __str__(self) -> str:
        return self.path

    def _as_tensor(self, what: str) -> NoReturn:
        writes = what in ("`[...] = ...`", "`+=`", "`-=`", "`*=`", "`/=`")
        line = f"model.{self.path}[:] = ..." if writes else f"value = model.{self.path}.save()"
        raise OutsideTrace(
            f"{what} needs a forward: outside a trace `{self.path}` is a reference, not a tensor.\n"
            f"{'Write' if writes else 'Read'} it inside one:\n"
            f"    with model.trace(prompt):\n"
            f"        {line}\n"
            f"or, in a trace without a prompt of its own, inside `with tracer.invoke(prompt):`."
        )

    def save(self) -> NoReturn:
        """Refused: there is nothing to save outside a trace."""
        self._as_tensor("`.save()`")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = [a for a in _flat((*args, *(kwargs or {}).values())) if isinstance(a, Reference)]
        found[0]._as_tensor(f"`{getattr(func, '__name__', func)}`")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._as_tensor(f"`.{name}`")


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _refuse(name: str) -> Any:
    def refused(self: Reference, *_: Any, **__: Any) -> NoReturn:
        self._as_tensor(f"`{name}`")

    refused.__name__ = name
    return refused


# Special methods are looked up on the class, so `__getattr__` does not see them. Each with what was written.
_OPERATORS: Final = {
    "+": "__add__ __radd__",
    "+=": "__iadd__",
    "-": "__sub__ __rsub__ __neg__",
    "-=": "__isub__",
    "*": "__mul__ __rmul__",
    "*=": "__imul__",
    "/": "__truediv__ __rtruediv__",
    "/=": "__itruediv__",
    "@": "__matmul__ __rmatmul__",
    "**": "__pow__",
    "<": "__lt__ __gt__",
    "<=": "__le__ __ge__",
    "[...]": "__getitem__",
    "[...] = ...": "__setitem__",
    "len()": "__len__",
    "iteration": "__iter__",
    "abs()": "__abs__",
    "float()": "__float__",
    "int()": "__int__",
    "bool()": "__bool__",
    "numpy": "__array__",
}

for _written, _methods in _OPERATORS.items():
    for _method in _methods.split():
        setattr(Reference, _method, _refuse(_written))
