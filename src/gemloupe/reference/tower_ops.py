"""The operations that the towers have and the text model has not, over the reals as those of `ops` are."""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import BadArgument
from .ops import linear, rmsnorm_unit
from .weights import PartWeights

__all__ = [
    "DEFAULT_EPS",
    "check_patches",
    "clipped_linear",
    "glu",
    "layer_norm",
    "limited",
    "project",
    "sinusoids",
    "softplus",
]

DEFAULT_EPS: Final = 1e-6
"""`Gemma4RMSNorm`'s own, of the norms that are given none by their config."""


def clipped_linear(
    weights: PartWeights, name: str, x: Float[Tensor, "... k"], *, clipped: bool
) -> Float[Tensor, "... n"]:
    """A linear map whose input and output are cut to the bounds that the checkpoint holds.

    Source: `Gemma4ClippableLinear`.
    """

    def cut(y: Tensor, of: str) -> Tensor:
        if not clipped:
            return y
        return y.clamp(*(weights[f"{name}.{of}_{end}"].double() for end in ("min", "max")))

    return cut(linear(weights[f"{name}.linear.weight"], cut(x, "input")), "output")


def limited(x: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    """No number larger than `limit`, nor than what the precision that the model has holds.

    Source: "gradient_clipping" in `Gemma4AudioLayer`, which clips activations: in float16 to 65504.
    """
    largest = min(limit, torch.finfo(dtype).max)
    return x.clamp(-largest, largest)


def layer_norm(
    eps: float,
    x: Float[Tensor, "... n"],
    weight: Float[Tensor, " n"],
    bias: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, "... n"]:
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, the variance that of all `n` numbers.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (2016).
    """
    away = x - x.mean(-1, keepdim=True)
    normed = away / torch.sqrt(away.square().mean(-1, keepdim=True) + eps) * weight.double()
    return normed if bias is None else normed + bias.double()


def project(weights: PartWeights, eps: float, x: Float[Tensor, "... k"]) -> Float[Tensor, "... hidden"]:
    """The last step of every medium: `embedding_projection(x / rms(x))`.

    Source: `Gemma4MultimodalEmbedder`.
    """
    return linear(weights["embedding_projection.weight"], rmsnorm_unit(eps, x))


def glu(x: Float[Tensor, "... 2*n"]) -> Float[Tensor, "... n"]:
    """`a * sigmoid(b)` of a row that holds both, `a` first.

    Source: Dauphin et al., "Language Modeling with Gated Convolutional Networks" (2017).
    """
    value, gate = x.chunk(2, -1)
    return value / (1 + torch.exp(-gate))


def softplus(x: Tensor) -> Tensor:
    """`log(1 + exp(x))`."""
    return torch.logaddexp(x, torch.zeros_like(x))


def sinusoids(distance: Int[Tensor, " n"], width: int) -> Float[Tensor, "n width"]:
    """Of each distance the sines and then the cosines of `distance / 10000 ** (k / (width / 2 - 1))`.

    Source: `Gemma4AudioRelPositionalEncoding`; the first period is a radian's, the last 10,000 of them.
    """
    count = width // 2
    k = torch.arange(count, device=distance.device).double()
    angle = distance[:, None] * 10_000 ** (-k / max(count - 1, 1))
    return torch.cat([angle.sin(), angle.cos()], -1)


def check_patches(pixels: Tensor, places: Tensor, *, patch_size: int, table_size: int) -> None:
    """Raises BadArgument, for pixels and places that do not fit one another or the tower."""
    numbers = 3 * patch_size**2
    if pixels.dim() != 3 or pixels.shape[-1] != numbers or not pixels.is_floating_point():
        raise BadArgument(f"pixel values are [images patches {numbers}], not {list(pixels.shape)}.")
    if places.shape != (*pixels.shape[:2], 2) or places.is_floating_point():
        raise BadArgument(
            f"position ids are whole numbers [images patches 2] beside pixel values of {list(pixels.shape)}, "
            f"not {list(places.shape)}."
        )
    if int(places.max()) >= table_size:
        raise BadArgument(f"position ids go up to {int(places.max())}; the table ends at {table_size - 1}.")
