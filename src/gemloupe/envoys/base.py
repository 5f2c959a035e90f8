"""What every host of standard values shares: its place in the tree, its plan, and its errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from nnsight.intervention.envoy import Envoy
from nnsight.intervention.source import SourceNotAvailable

from ..errors import BadWrite, NoSuchBlock, Unavailable, UnknownName, UnsupportedRelease
from ..served import served_values

if TYPE_CHECKING:
    from nnsight.intervention.interleaver import Mediator

    from ..ledger import StandardInterleaver
    from ..plan import BlockPlan, ModelPlan
    from ..served import Served

__all__ = ["Blocks", "Operation", "PartOfBlock", "StandardEnvoy"]


# What other libraries and papers call our values, for the hint beside an unknown name.
SYNONYMS: Final = {
    "resid_pre": "layer_input",
    "resid_mid": "mid_stream",
    "resid_post": "layer_output",
    "hidden_states": "layer_output",
    "attn_out": "attention_output",
    "mlp_out": "mlp_output",
    "pattern": "attention_probabilities",
    "attn_pattern": "attention_probabilities",
    "attention_pattern": "attention_probabilities",
    "attention_weights": "attention_probabilities",
    "attn_weights": "attention_probabilities",
    "attn_scores": "attention_scores",
    "gate_logits": "router_logits",
    "blocks": "layers",
    "attention": "self_attn",
    "attn": "self_attn",
}


@dataclass(frozen=True)
class Operation:
    """An operation inside a module's `forward`, named by the line of source that performs it.

    nnsight numbers the operations of a forward from its source text (`hidden_states_2`), and the
    numbers move when transformers adds a line. The line itself is steadier: the operation is the
    `nth` one called `name` on a line that contains `line`.
    """

    name: str
    line: str
    nth: int = 0
    since: str | None = None
    """The first transformers release that has the line, where an older supported one lacks it."""

    def label(self, compiled: Any) -> str | None:
        """nnsight's label for it in a compiled forward, or `None` where the line is not there."""
        text = compiled.source.split("\n")
        labels = [
            label
            for label in compiled.names
            if label.rpartition("_")[0] == self.name and self.line in text[compiled.lines[label] - 1]
        ]
        return labels[self.nth] if len(labels) > self.nth else None


class StandardEnvoy(Envoy):
    """An envoy that serves standard values."""

    interleaver: StandardInterleaver

    OPERATIONS: ClassVar[dict[str, Operation]] = {}
    """The operations that values of this class are served from, by a name of ours."""

    PARTS: ClassVar[dict[str, Callable[[Any], str | None]]] = {}
    """Modules reached through this envoy that not every load has, and why this one lacks them."""

    # -- place -----------------------------------------------------------------------------------

    @property
    def standard_path(self) -> str:
        """Where this envoy is, as a user writes it after `model.`: `layers[3].mlp`."""
        return self.path.partition(".")[2]

    @property
    def model_plan(self) -> ModelPlan:
        """What the config says of the whole model."""
        return self.root.plan

    def relative(self, of: str) -> StandardEnvoy:
        """The envoy a value's location counts from: `self`, `block`, or `root`."""
        if of == "self":
            return self
        return getattr(self, of)

    def rows(self, mediator: Mediator) -> slice:
        """Of what this host computes along the first axis, what is `mediator`'s: its rows of the batch."""
        group, batcher = mediator.batch_group, self.interleaver.batcher
        if group is None or batcher is None or not batcher.batching:
            return slice(None)
        return slice(group[0], group[0] + group[1])

    def check_runs(self, value: Served, mediator: Mediator, state: Any) -> None:
        """Refuse a value that the call, or the present step of it, does not compute.

        Raises: NeverRan.
        """

    def first_pass(self, value: Served, mediator: Mediator) -> int:
        """How often the module runs in a forward before it runs on what is `mediator`'s."""
        return 0

    # -- locations -------------------------------------------------------------------------------

    def location(self, at: str) -> str:
        """The name by which nnsight serves `at`, relative to this envoy.

        `norm.output` is a module's; `source.NAME.output` is an operation's, NAME one of `OPERATIONS`.
        """
        head, _, rest = at.partition(".")
        child = self.__dict__.get(head)
        if isinstance(child, StandardEnvoy):
            return child.location(rest)
        if isinstance(child, Envoy):
            return f"{child.path}.{rest}"
        if head != "source":
            return f"{self.path}.{at}"
        name, _, end = rest.partition(".")
        return f"{self.path}.source.{self.labels[name]}.{end}"

    @property
    def labels(self) -> dict[str, str | None]:
        """nnsight's label for each of `OPERATIONS`, `None` for one this transformers release lacks.

        Instruments the module's forward on first use.
        """
        state = self.__dict__.get("_labels")
        if state is None or state[0] is not self._module:
            state = (self._module, self._find_operations())
            self.__dict__["_labels"] = state
        return state[1]

    def _find_operations(self) -> dict[str, str | None]:
        kind = type(self._module).__name__
        try:
            compiled = self.source.compiled
        except SourceNotAvailable as error:
            raise UnsupportedRelease(f"{kind}.forward cannot be instrumented: {error}") from error
        found = {name: operation.label(compiled) for name, operation in self.OPERATIONS.items()}
        for name, label in found.items():
            if label is None and self.OPERATIONS[name].since is None:
                import transformers

                raise UnsupportedRelease(
                    f"transformers {transformers.__version__} spells {kind}.forward in a way this release of "
                    f"gemloupe does not know: no line has {self.OPERATIONS[name].line!r}. "
                    f"Install a transformers release between 5.20 and 5.24."
                )
        return found

    # -- names -----------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        value = served_values(type(self)).get(name)
        if value is not None:
            # The descriptor raised: an `Unavailable`, which Python took for "no such attribute".
            reason = value.why_not(self)
            raise Unavailable(f"{value.path_on(self)}: {reason}")
        missing = type(self).PARTS.get(name)
        reason = None if missing is None else missing(self)
        if reason is not None:
            raise Unavailable(f"{self._under(name)}: {reason}")
        if missing is not None and (part := self._part(name)) is not None:
            return part
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            place = "a part of a model that is gone" if self._orphaned() else self.standard_path
            place = place or "the model"
            raise UnknownName(lambda: self._unknown(name, place)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        number = isinstance(value, (torch.Tensor, int, float)) and not isinstance(value, bool)
        if number and not name.startswith("_") and not hasattr(type(self), name):
            weight = getattr(self.__dict__.get("_module"), name, None)
            if weight is value:
                return  # `layer_scalar *= 2`, which has been done
            if isinstance(weight, torch.Tensor):
                raise BadWrite(
                    f"{self._under(name)} is a weight of the model, not a value of a forward, and cannot be "
                    f"assigned. In place, `model.{self._under(name)}[...] = ...`, it is changed for good."
                )
            # A tensor or a number under a name that is no value would be kept here and reach nothing.
            raise UnknownName(self._unknown(name, self.standard_path or "the model"))
        super().__setattr__(name, value)

    def _orphaned(self) -> bool:
        """Whether the model this was a part of is gone: nobody held it."""
        envoy: Any = self
        while envoy is not None:
            above = envoy.__dict__.get("_parent")
            if above is None:
                return False
            envoy = above()
        return True

    def _part(self, name: str) -> Any:
        """The module `name` of `PARTS` where it hangs elsewhere in the tree."""
        return None

    def _under(self, name: str) -> str:
        return f"{self.standard_path}.{name}" if self.standard_path else name

    def _unknown(self, name: str, place: str) -> str:
        meant = None if self._orphaned() else self._meant(name)  # the model may be gone when this is shown
        return f"{place} has no `{name}`." + (f" Did you mean `{meant}`?" if meant else "")

    def _meant(self, name: str) -> str | None:
        """What a user who wrote `name` here may want: it elsewhere, by another name, or nearly it."""
        wanted = SYNONYMS.get(name, name)
        for path, kind in self._neighbours():
            if wanted in served_values(kind):
                return f"{path}.{wanted}" if path else wanted
        if wanted != name and wanted in self._known_names():
            return wanted
        near = get_close_matches(name, self._known_names(), n=1, cutoff=0.6)
        return near[0] if near else None

    def _neighbours(self) -> list[tuple[str, type]]:
        """The hosts of values near this one, with the path a user writes to reach them."""
        return [("", type(self))]

    def _known_names(self) -> list[str]:
        ours = [kind for kind in type(self).__mro__ if kind.__module__.startswith("gemloupe")]
        facts = [name for kind in ours for name, what in vars(kind).items() if isinstance(what, property)]
        names = [*served_values(type(self)), *facts, *type(self).PARTS, *self._child_map, *self._aliases]
        return [name for name in names if not name.startswith("_")]

    def __repr__(self) -> str:
        """nnsight's tree, without the values that are not there."""
        absent = [value for value in served_values(type(self)).values() if value.why_not(self) is not None]
        lines = {f"  {value}" for value in absent}
        return "\n".join(line for line in super().__repr__().split("\n") if line not in lines)


class PartOfBlock(StandardEnvoy):
    """A block of the text stack, or a module inside one: it knows the block and its plan."""

    @property
    def block(self) -> Any:
        """The block this envoy belongs to."""
        return self.parent

    @property
    def block_plan(self) -> BlockPlan:
        """What the config says of the block."""
        return self.model_plan.blocks[self.block.index]

    @property
    def standard_path(self) -> str:
        return f"{self.block.standard_path}.{self.path.rpartition('.')[2]}"

    def _neighbours(self) -> list[tuple[str, type]]:
        block = self.block
        hosts = (block, block.self_attn, block.mlp)
        return [
            *super()._neighbours(),
            *((host.standard_path, type(host)) for host in hosts if host is not self),
        ]


class Blocks(Envoy):
    """The blocks of a stack: indexed, sliced and iterated like a list."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and not -len(self) <= key < len(self):
            stack = super().__getitem__(0).standard_path.partition("[")[0]
            raise NoSuchBlock(
                f"{stack}[{key}] does not exist: the stack has {len(self)} blocks, 0 to {len(self) - 1}."
            )
        return super().__getitem__(key)
