"""Each chosen expert's own contribution, under any experts implementation.

transformers runs the experts by one of several functions (`integrations.moe.ALL_EXPERTS_FUNCTIONS`).
`batched_mm` and `grouped_mm` hold all weighted outputs in one tensor, in token order, just before they
sum them: that tensor is served. `eager` loops over the experts and holds one expert's at a time: there
the block that is asked computes them by the same operations, and its sum replaces the call's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
import transformers
from nnsight.intervention.interleaver import Mediator
from nnsight.intervention.source import compiled

from ..errors import UnsupportedRelease
from ..ledger import running, same_memory
from ..served import Moment, Served
from .base import Operation, PartOfBlock

__all__ = ["ExpertOutputs", "Experts"]


class Experts(PartOfBlock):
    """The experts of a mixture block. Their values are on `layers[i].mlp`."""

    OPERATIONS: ClassVar[dict[str, Operation]] = {
        # `use_experts_implementation` replaces the class's forward by a dispatcher; this is its call.
        "call": Operation("experts_forward", "return experts_forward(self, "),
    }


# The line of each fused function that holds the weighted outputs in token order.
WEIGHTED: Final = {
    "batched_mm": Operation("weighted_out", "weighted_out = proj_out * sample_weights"),
    "grouped_mm": Operation("weighted_out", "weighted_out = weighted_out[inv_perm]"),
}


class ExpertOutputs(Served):
    """`expert_outputs`: the descriptor, whose location depends on the experts implementation."""

    def __init__(
        self,
        tokens: Callable[[Any, torch.Tensor], torch.Tensor],
        flattened: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor],
        needs: Callable[[Any], str | None],
        moment: Moment,
    ) -> None:
        super().__init__("", of="block", needs=needs, moment=moment)
        self._tokens = tokens
        self._flattened = flattened

    def why_not(self, host: Any) -> str | None:
        reason = super().why_not(host)
        known = ("eager", *WEIGHTED)
        if reason is not None or implementation(host) in known:
            return reason
        return (
            f"the experts implementation {implementation(host)!r} does not hold them one by one.\n"
            f"Load with experts_implementation= one of {', '.join(known)}, or use routed_output, their sum."
        )

    # -- where it is: inside the fused function, or at the gate of the call -----------------------

    def _location(self, obj: Any) -> str:
        call = obj.block.location("experts.source.call.skip")
        fused = WEIGHTED.get(implementation(obj))
        if fused is None:
            return call
        # At the top it would nearly double the package's import; a loaded model has imported it anyway.
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        label = fused.label(compiled(ALL_EXPERTS_FUNCTIONS[implementation(obj)]))
        if label is None:
            raise UnsupportedRelease(
                f"transformers {transformers.__version__} spells its {implementation(obj)} experts in a way "
                f"this release of gemloupe does not know. Load with experts_implementation='eager'."
            )
        return f"{call.removesuffix('.skip')}.source.{label}.output"

    def _capture(self, obj: Any, mediator: Mediator, state: Any, location: str) -> None:
        super()._capture(obj, mediator, state, location)
        if implementation(obj) in WEIGHTED:
            # Asks nnsight to instrument the function that this call runs; waits for the call.
            experts = obj.block.experts
            _ = getattr(experts.source, experts.labels["call"]).source
            return
        gate = obj.block.location("experts.source.call.input")
        if mediator.occurrence(gate) <= self._visit(obj, mediator, state):
            state.captured[(gate, self._visit(obj, mediator, state))] = whole_batch(mediator, gate)

    def _is_late(self, obj: Any, mediator: Mediator, state: Any, location: str) -> bool:
        if super()._is_late(obj, mediator, state, location):
            return True
        # nnsight counts the visits inside the fused function only where it was asked for in time.
        call = obj.block.location("experts.source.call.output")
        return mediator.occurrence(call) > self._visit(obj, mediator, state)

    # -- what it is ------------------------------------------------------------------------------

    def current(self, host: Any, raw: Any) -> Any:
        if isinstance(raw, torch.Tensor) and implementation(host) in WEIGHTED:
            return self._stub(host, self._tokens(host, raw.unflatten(0, (-1, host.top_k))))
        return self._stub(host, self._tokens(host, self._held(host)))

    def settle(self, host: Any, view: Any, raw: Any) -> Any:
        if implementation(host) in WEIGHTED:
            return super().settle(host, view, raw)
        host.interleaver.ledger.settle(view)
        return self._replace(host, raw, view)

    def _replace(self, host: Any, raw: Any, new: Any) -> Any:
        if implementation(host) in WEIGHTED:
            whole = raw.unflatten(0, (-1, host.top_k))
            return raw if same_memory(new, raw) else self._flattened(host, new, whole).flatten(0, 1)
        whole = self._held(host, self._flattened(host, new, self._held(host)))
        _, states, indices, _ = self._call(host)
        total = summed(whole, indices, states)
        if not isinstance(raw, torch.Tensor):
            return total
        # Another invoke has replaced the call already: keep its rows.
        return self._flattened(host, self._tokens(host, total), raw)

    def _held(self, host: Any, new: torch.Tensor | None = None) -> torch.Tensor:
        """All rows' contributions to the running call under `eager`, edits included, or `new` from now on.

        No tensor of the model holds them: what one worker writes is kept for the next read, whoever's.
        """
        ledger: Any = host.interleaver.ledger
        mediator = running(host.interleaver)
        assert mediator is not None
        key = (self._location(host), ledger.of(mediator).moment[2])
        held = ledger.contributions
        if new is not None:
            held = (key, new)
        elif held is None or held[0] != key:
            held = (key, contributions(*self._call(host)))
        ledger.contributions = held
        return held[1]

    def _call(self, host: Any) -> tuple:
        mediator = running(host.interleaver)
        assert mediator is not None
        state = host.interleaver.ledger.of(mediator)
        gate = host.block.location("experts.source.call.input")
        args, _ = state.captured[(gate, state.moment[2])]
        return args


def whole_batch(mediator: Mediator, location: str) -> Any:
    """What a location holds of all invokes' rows.

    nnsight cuts a tensor to an invoke's rows where its first axis is as long as the batch, which the
    mixture's flat tensors are when every row has one token.
    """
    mediator.flush()  # what waits to go back is of this invoke's rows
    group, mediator.batch_group = mediator.batch_group, None
    try:
        return Mediator.value(location)
    finally:
        mediator.batch_group = group


def implementation(host: Any) -> str:
    """The experts implementation the model runs."""
    return host.block.experts._module.config._experts_implementation


def contributions(
    module: Any, states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Each chosen expert's weighted output, `[tokens top_k hidden]`, by the model's own eager function.

    Every choice is given to it as a token of its own with a single expert. Choices go in the order in
    which the loop visits them (all first choices, then all second ones), so each expert multiplies the
    very rows it would, and no bit differs.
    """
    top_k = indices.shape[-1]
    rows = type(module).forward(
        module,
        states.repeat(top_k, 1),
        indices.t().reshape(-1, 1),
        weights.t().reshape(-1, 1),
    )
    return rows.unflatten(0, (top_k, -1)).transpose(0, 1).contiguous()


def summed(outputs: torch.Tensor, indices: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """The sum over top_k in the order in which transformers' eager loop adds: by expert number."""
    total = torch.zeros_like(states)
    for expert in indices.unique().tolist():
        choice, token = torch.where(indices.t() == expert)
        total.index_add_(0, token, outputs[token, choice].to(total.dtype))
    return total
