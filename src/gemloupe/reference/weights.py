"""The weights that the reference reads: a state dict, checked against what the config says it holds.

Nothing is converted or copied here. `ops` takes each weight as the numbers it holds, one at a time, so a
model's weights never stand in memory twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from ..errors import BadArgument, UnsupportedModel
from ..plan import ModelPlan, plan
from .towers import Towers
from .towers import towers as towers_of

__all__ = ["PartWeights", "Weights", "text_names"]

_WRAPPED: Final = "model.language_model."
_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "model.embed_tokens.weight"

# fp8 and smaller hold numbers only together with scales that are stored elsewhere.
_PRECISIONS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# What a clipped linear map clips to, which is no weight and may be infinite: then it clips nothing.
_BOUND: Final = re.compile(r"\.(input|output)_(min|max)$")

# Published checkpoints also hold what a borrowing block would compute its own keys and values with.
_UNUSED_BY_BORROWERS: Final = re.compile(r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight")


def text_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The text model's tensors under their names in `*ForCausalLM`, out of its state dict or a wrapper's.

    Of a wrapper's (`model.language_model.*`, `lm_head` at the root) the towers are left out.
    """
    if not any(name.startswith(_WRAPPED) for name in state):
        return dict(state)
    stack = {name.replace(_WRAPPED, "model.", 1): state[name] for name in state if name.startswith(_WRAPPED)}
    return stack | {name: state[name] for name in state if name.startswith("lm_head.")}


def _tower_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `text_names` leaves out of a wrapper's state dict, under its names there."""
    return {name: state[name] for name in state if not name.startswith((_WRAPPED, "lm_head."))}


class Weights:
    """A model's weights by name, and the plans that say what they are.

        weights = Weights(model.config, model.state_dict())

    The text model's have their names in `*ForCausalLM`, the towers' theirs in `*ForConditionalGeneration`.
    The towers are known where both the config and the state are a wrapper's; with the text model's config or
    with a plan they are left out.

    config: a transformers config or a `ModelPlan`.
    state: names as in `*ForCausalLM`, or as in `*ForConditionalGeneration`; a tied `lm_head` may be left out.
    towers: what is known of a wrapper's towers, where `config` is a plan.
    device: where to compute, to which each weight is taken when it is used; where the embedding is if it is
        not given.

    Raises: UnsupportedModel, for a config that is not known, and for a quantized, sharded or absent weight;
    BadArgument, for one that the config does not expect, that is missing, or of another shape. A weight
    that is not finite raises BadArgument when it is used.
    """

    def __init__(
        self,
        config: Any,
        state: Mapping[str, Tensor],
        *,
        towers: Towers | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.plan: ModelPlan = config if isinstance(config, ModelPlan) else plan(config)
        self._tensors = text_names(state)
        self.towers: Towers | None = None
        if any(name.startswith(_WRAPPED) for name in state):
            self.towers = towers_of(config) if towers is None else towers
        if self.towers is not None:
            self._tensors |= _tower_names(state)
        self._finite: set[str] = set()
        refusal = next(_refusals(self.plan, self.towers, self._tensors), None)
        if refusal is not None:
            raise refusal
        self.device = torch.device(device or self._tensors[_EMBEDDING].device)
        if self.device.type == "mps":  # which knows no float64
            self.device = torch.device("cpu")

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].detach()
        if name not in self._finite:
            _check_finite(name, tensor)
            self._finite.add(name)
        return tensor.to(self.device)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The precisions that the weights are held in."""
        return {tensor.dtype for tensor in self._tensors.values()}

    def check(self) -> None:
        """Read every weight once.

        Raises: BadArgument, for the first that is not finite.
        """
        for name, tensor in self._tensors.items():
            if name not in self._finite:
                _check_finite(name, tensor.detach())
                self._finite.add(name)

    def of_block(self, index: int) -> PartWeights:
        """The weights of the text model's block `index`, by their names inside it."""
        return self.under(f"model.layers.{index}.")

    def under(self, path: str) -> PartWeights:
        """The weights whose names begin with `path`, by the rest of them."""
        return PartWeights(self, path)

    def real(self, tensor: Tensor) -> Tensor:
        """The numbers that a tensor holds, where the weights are used: float64, but for whole numbers."""
        dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(self.device, dtype)

    @property
    def head(self) -> Tensor:
        """`lm_head`'s weight, `[vocab hidden]`: the embedding's, where a tied one was left out."""
        return self[_HEAD if _HEAD in self._tensors else _EMBEDDING]


class PartWeights:
    """The weights of one part of the model, a block or a tower, by their names inside it."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights = weights
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._prefix + name]


def _check_finite(name: str, tensor: Tensor) -> None:
    if _BOUND.search(name) and not bool(tensor.isnan().any()):
        return
    # The largest magnitude is finite only if all are; unlike `isfinite` it makes no second tensor.
    if tensor.numel() and not bool(torch.linalg.vector_norm(tensor, torch.inf).isfinite()):
        kind = "NaN" if bool(tensor.isnan().any()) else "infinity"
        raise BadArgument(f"{name} holds {kind}: nothing computed from it has a meaning. Load it again.")


# ---- the refusals: checks yield errors and `Weights` raises the first -------------------------------------


def _refusals(plan: ModelPlan, towers: Towers | None, tensors: Mapping[str, Tensor]) -> Iterator[Exception]:
    expected = plan.parameter_shapes() | ({} if towers is None else towers.shapes())
    # A buffer, and so no parameter.
    expected |= {f"model.layers.{block.index}.layer_scalar": (1,) for block in plan.blocks}
    for name, shape in expected.items():
        if name not in tensors:
            yield BadArgument(f"{name} is missing; pass the whole state_dict() of the model.")
            continue
        yield from _unusable(name, tensors[name])
        if (found := tuple(tensors[name].shape)) != shape:
            yield BadArgument(f"{name} has the shape {list(found)}; by the config it is {list(shape)}.")
    if _HEAD in tensors:
        yield from _unusable(_HEAD, tensors[_HEAD])
    for name in tensors:
        if name not in expected and name != _HEAD and not _is_unused(plan, name):
            yield BadArgument(
                f"{name}: the reference knows no such weight of {plan.model_type}, and does not leave out "
                f"what may change the computation. Merge an adapter before you pass its model."
            )


def _unusable(name: str, tensor: Tensor) -> Iterator[Exception]:
    kind = type(tensor).__name__
    if hasattr(tensor, "placements"):
        yield UnsupportedModel(f"{name} is sharded over devices ({kind}): load the model whole.")
    elif type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.dtype not in _PRECISIONS:
        how = kind if tensor.dtype in _PRECISIONS else str(tensor.dtype)
        yield UnsupportedModel(f"{name} is quantized ({how}): load the model in bfloat16 or float32.")
    elif tensor.is_meta:
        yield UnsupportedModel(f"{name} holds no numbers (it is on the meta device): load the weights first.")


def _is_unused(plan: ModelPlan, name: str) -> bool:
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if match is None or int(match[1]) >= plan.num_layers:
        return False
    return plan.blocks[int(match[1])].borrows_keys and bool(_UNUSED_BY_BORROWERS.fullmatch(match[2]))
