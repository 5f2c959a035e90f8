"""The MLP of a text block and, on a mixture block, the experts beside it.

On a mixture block

    dense  = post_feedforward_layernorm_1(shared_expert_output)
    routed = post_feedforward_layernorm_2(routed_output)
    mlp_output = post_feedforward_layernorm(dense + routed)

The forward runs them in this order: the dense MLP, its norm, the router, the experts, their norm, the
common norm. The routing values belong to one moment and may be read in any order among themselves.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
from nnsight.intervention.interleaver import Mediator

from ..errors import BadArgument, BadWrite, OutOfOrder, OutsideTrace, Unavailable
from ..layouts import ExpertIndices, ExpertScores, ExpertWeights, Neurons, Residual
from ..layouts import ExpertOutputs as ExpertOutputsLayout
from ..ledger import running
from ..served import Argument, Item, Moment, Served, late_text, served
from .absence import no_mixture
from .base import Operation, PartOfBlock
from .experts import ExpertOutputs
from .facts import BlockFacts

__all__ = ["Mlp", "Router"]

ROUTING: Final = Moment(
    "routing",
    of="block",
    anchor="post_feedforward_layernorm_1.output",
    members=(
        "router.proj.output",
        "router.source.probabilities.output",
        "router.output",
    ),
)


class Router(PartOfBlock):
    """The router of a mixture block. Its values are on `layers[i].mlp`."""

    OPERATIONS: ClassVar[dict[str, Operation]] = {
        "probabilities": Operation("router_probabilities", "router_probabilities = nn.functional.softmax("),
    }


def tokens(host: Any, flat: torch.Tensor) -> torch.Tensor:
    """One invoke's rows of a tensor the model holds flat over tokens: `[batch seq ...]`, a view.

    nnsight cuts a tensor to an invoke's rows by its first axis, which here is `batch * seq`.
    """
    start, batch, seq = extent(host, flat)
    if flat.shape[0] != batch * seq:
        flat = flat.narrow(0, start * seq, batch * seq)
    return flat.unflatten(0, (batch, seq))


def flattened(host: Any, new: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """The inverse of `tokens`: `flat` with this invoke's rows replaced by `new`."""
    start, batch, seq = extent(host, flat)
    rows = new.flatten(0, 1)
    if flat.shape[0] == batch * seq:
        return rows
    before, after = start * seq, (start + batch) * seq
    return torch.cat([flat[:before], rows, flat[after:]])


def extent(host: Any, flat: torch.Tensor) -> tuple[int, int, int]:
    """Where an invoke's rows start, how many there are, and how many tokens each has."""
    interleaver = host.interleaver
    mediator = running(interleaver)
    assert mediator is not None
    batcher, group = interleaver.batcher, mediator.batch_group
    start = group[0] if group is not None and batcher.batching else 0
    anchor = interleaver.ledger.of(mediator).anchor(host.block.location(ROUTING.anchor))
    if anchor is not None:
        return start, anchor.shape[0], anchor.shape[1]
    # The anchor had passed when the first routing value was asked for (only after a native read).
    rows = group[1] if group is not None and batcher.batching else batcher.total
    seq = max(1, flat.shape[0] // batcher.total)
    return start, rows, seq


def enough_experts(host: Any, new: torch.Tensor) -> None:
    """Refuse router scores that leave a token fewer experts than it is routed to.

    Raises: BadWrite.
    """
    left = int(torch.isfinite(new).sum(-1).min()) if new.numel() else 0
    if new.numel() and left < (host.top_k or 0):
        raise BadWrite(
            f"{host.standard_path}.router_logits: a token keeps {left} experts with a finite score, "
            f"and it is routed to {host.top_k}. Leave at least that many."
        )


class Mlp(BlockFacts, PartOfBlock):
    """`layers[i].mlp`, with the mixture's values on a mixture block."""

    PARTS: ClassVar = {"router": no_mixture, "experts": no_mixture}

    def _part(self, name: str) -> Any:
        return getattr(self.block, name)

    # -- the dense MLP ---------------------------------------------------------------------------

    @served("input", piece=Argument(0, "x"))
    def mlp_input(self, value: Any) -> Residual:
        """The normed stream that the dense MLP reads.

        Layout: [batch seq hidden]. On a mixture block the experts read the stream through a norm of
        their own, so a write here reaches the dense MLP alone.
        """
        return value

    @served("down_proj.input", piece=Argument(0, "input"))
    def mlp_neurons(self, value: Any) -> Neurons:
        """The dense MLP's activations, entering `down_proj`.

        Layout: [batch seq intermediate].
        """
        return value

    @served("output", needs=no_mixture)
    def shared_expert_output(self, value: Any) -> Residual:
        """The dense MLP's output beside a mixture, before its own post-norm.

        Layout: [batch seq hidden].
        Raises: Unavailable, on a dense block (there it is `mlp_projection`).
        """
        return value

    @served("post_feedforward_layernorm.input", of="block", piece=Argument(0, "hidden_states"))
    def mlp_projection(self, value: Any) -> Residual:
        """What the post-norm receives: `down_proj`'s output, or on a mixture block the sum of both branches.

        Layout: [batch seq hidden].
        """
        return value

    @served("post_feedforward_layernorm.output", of="block")
    def mlp_output(self, value: Any) -> Residual:
        """What the MLP adds to the stream, experts included, after the post-norm, unscaled.

        Layout: [batch seq hidden].
        """
        return value

    # -- the mixture -----------------------------------------------------------------------------

    @served("router.proj.output", of="block", needs=no_mixture, moment=ROUTING)
    def router_logits(self, value: Any) -> ExpertScores:
        """The router's scores of all experts, before its softmax.

        Layout: [batch seq experts]. A write re-routes: weights and `per_expert_scale` follow.
        Raises: Unavailable, on a dense block.
        Source: `router.proj`'s output; transformers' own "router_logits" are probabilities.
        """
        return tokens(self, value)

    router_logits.back(flattened)

    router_logits.check(enough_experts)

    @served("router.source.probabilities.output", of="block", needs=no_mixture, moment=ROUTING)
    def router_probabilities(self, value: Any) -> ExpertScores:
        """The softmax of `router_logits` over all experts, float32.

        Layout: [batch seq experts], rows sum to one. A write re-routes: the `top_k` largest are chosen,
        renormalised, and scaled by `per_expert_scale`.
        Raises: Unavailable, on a dense block.
        """
        return tokens(self, value)

    router_probabilities.back(flattened)

    @served("router.output", of="block", piece=Item(1), needs=no_mixture, moment=ROUTING)
    def expert_weights(self, value: Any) -> ExpertWeights:
        """The weight of each chosen expert: renormalised over the chosen, times `per_expert_scale`.

        Layout: [batch seq top_k], in the order of `expert_indices`.
        Raises: Unavailable, on a dense block.
        """
        return tokens(self, value)

    expert_weights.back(flattened)

    @served(
        "router.output",
        of="block",
        piece=Item(2),
        needs=no_mixture,
        moment=ROUTING,
        read_only="its weights and per_expert_scale would stay those of the experts it replaces.\n"
        "Write `mlp.reroute(indices)`, which recomputes them.",
    )
    def expert_indices(self, value: Any) -> ExpertIndices:
        """The experts each token is routed to.

        Layout: [batch seq top_k]. Read only; `reroute(indices)` sends tokens to chosen experts.
        Raises: Unavailable, on a dense block.
        """
        return tokens(self, value)

    @ExpertOutputs(tokens, flattened, needs=no_mixture, moment=ROUTING)
    def expert_outputs(self, value: Any) -> ExpertOutputsLayout:
        """The weighted output of each chosen expert.

        Layout: [batch seq top_k hidden], in the order of `expert_indices`; their sum over top_k is
        `routed_output`. A write reaches that sum.
        Raises: Unavailable, on a dense block, or under an experts implementation other than `eager`,
        `batched_mm` and `grouped_mm`.
        """
        return value

    @served(
        "post_feedforward_layernorm_2.input", of="block", piece=Argument(0, "hidden_states"), needs=no_mixture
    )
    def routed_output(self, value: Any) -> Residual:
        """The sum of the chosen experts' weighted outputs, before its post-norm.

        Layout: [batch seq hidden], equal to `expert_outputs.sum(top_k)`.
        Raises: Unavailable, on a dense block.
        """
        return value

    def reroute(self, indices: torch.Tensor) -> None:
        """Send tokens to chosen experts, weights and `per_expert_scale` recomputed for them.

        `indices` are expert numbers, `[batch seq top_k]` like `expert_indices`. To be called inside a
        trace, before the block's experts run. Each weight is the expert's probability over the sum of
        the chosen ones' probabilities, times its `per_expert_scale` (`Gemma4TextRouter.forward`).

        Raises: Unavailable, on a dense block; BadArgument, for an index out of range or a wrong shape.
        """
        name = f"{self.standard_path}.reroute"
        reason = no_mixture(self)
        if reason is not None:
            raise Unavailable(f"{name}: {reason}")
        mediator = running(self.interleaver)
        if mediator is None:
            raise OutsideTrace(
                f"{name} works inside a trace: `with model.trace(prompt): model.{name}(indices)`."
            )
        self._check_indices(name, indices)
        value: Served = type(self).__dict__.get("expert_indices") or Mlp.__dict__["expert_indices"]
        state = self.interleaver.ledger.of(mediator)
        location = self.block.location("router.output")
        if value._is_late(self, mediator, state, location):
            raise OutOfOrder(late_text(name, state.last, "call"))
        value._capture(self, mediator, state, location)
        probabilities, weights, chosen = raw = Mediator.value(location)
        current = tokens(self, chosen)
        if indices.shape != current.shape:
            raise BadArgument(
                f"{name} takes indices of shape {tuple(current.shape)} [batch seq top_k], "
                f"not {tuple(indices.shape)}."
            )
        chosen = flattened(self, indices.to(current), chosen)
        router = self.router._module
        fresh = probabilities.gather(-1, chosen)
        fresh = fresh / fresh.sum(-1, keepdim=True) * router.per_expert_scale[chosen]
        weights = flattened(self, tokens(self, fresh).to(weights.dtype), weights)
        Mediator.swap(location, (raw[0], weights, chosen))
        state.last = name

    def _check_indices(self, name: str, indices: Any) -> None:
        if (
            not isinstance(indices, torch.Tensor)
            or indices.is_floating_point()
            or indices.dtype == torch.bool
        ):
            raise BadArgument(f"{name} takes an integer tensor [batch seq top_k].")
        if bool((indices.sort(-1).values.diff(dim=-1) == 0).any()):
            raise BadArgument(
                f"{name}: a token is sent to one expert twice; give it {self.top_k} different ones."
            )
        experts = self.num_experts or 0
        if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < experts):
            raise BadArgument(
                f"{name}: experts are numbered 0 to {experts - 1}; the indices go from "
                f"{int(indices.min())} to {int(indices.max())}."
            )
