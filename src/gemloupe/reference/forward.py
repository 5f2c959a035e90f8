"""A whole Gemma 4 model: from token ids to every value that a forward has.

    token_embeddings = sqrt(hidden) * embed_tokens[ids]
    per_layer_inputs = (context + sqrt(ple) * embed_tokens_per_layer[ids]) / sqrt(2)
        context      = per_layer_projection_norm(per_layer_model_projection(token_embeddings) / sqrt(hidden))
    stream           = block(stream), for each block
    raw_logits       = lm_head(norm(stream))
    logits           = cap * tanh(raw_logits / cap)

In a wrapper a token of a medium has the pad token's embeddings, and the medium's features replace them in the
stream that enters the first block, of which the context half of the per-layer inputs is projected then.

The roots are rounded as the model rounds them: see `_embedding_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import BadArgument
from ..layouts import PerLayerInputs, Residual, Tokens
from .block import block
from .cache import Cache
from .media import Media, ids_of_text, scattered, token_masks
from .ops import embed, linear, lm_head, residual, rmsnorm, softcap, softmax
from .sight import sight
from .steps import Given, Steps, taken
from .weights import Weights

__all__ = ["embeddings", "entrance", "forward", "head", "parts", "per_layer_inputs"]

# Of `lm_head`'s rows, so many become float64 at a time: half a gigabyte at a hidden size of 4096.
_HEAD_ROWS: Final = 16_384


def forward(
    config: Any,
    state: Mapping[str, Tensor],
    input_ids: Tokens,
    attention_mask: Tokens | None = None,
    *,
    images: Tokens | None = None,
    media: Media | None = None,
    cache: Cache | None = None,
    given: Given | None = None,
) -> dict[str, Tensor]:
    """Every value of one forward by its standard name, in forward order, in float64.

        values = forward(model.config, model.state_dict(), input_ids)
        values["layers[3].self_attn.attention_queries"]

    The names are those of `names(plan(config))`; ids and `expert_indices` are int64. With `media` they are
    those of `names(plan(config), towers(config), media.kinds)`; where there are images and frames of video,
    the tower's values are those of the images.

    config: a transformers config, a wrapper's too, or a `ModelPlan`.
    state: the model's tensors, named as in `*ForCausalLM` or as in `*ForConditionalGeneration`.
    input_ids: `[batch seq]`. attention_mask: `[batch seq]`, 0 on padding, which is to be on the left:
        positions are counted from each row's first real token. Values on padding have no meaning.
    images: which image each token belongs to, -1 for none; see `sight`. It says who sees ahead, not more; a
        model that is called without `mm_token_type_ids` is as one without images. See `runs_of_media`.
    media: the images, frames of video and sounds whose features replace the tokens of media, on a wrapper.
    cache: the tokens before these; the new ones are appended to it.
    given: values by name that take the place of the computed ones in all that follows from them, as an
        edit does, or a function of a name and the computed value; what is returned under their names is
        what was computed.

    Raises: as `Weights`; BadArgument, for ids or masks that do not fit.
    """
    weights = Weights(config, state)
    values: dict[str, Tensor] = {}
    of_media = {"images": images, "media": media}
    for part in parts(weights, input_ids, attention_mask, **of_media, cache=cache, given=given):
        values |= {name: value for name, value in part.items() if name not in values}
    return values


def parts(
    weights: Weights,
    input_ids: Tokens,
    attention_mask: Tokens | None = None,
    *,
    images: Tokens | None = None,
    media: Media | None = None,
    cache: Cache | None = None,
    given: Given | None = None,
) -> Iterator[dict[str, Tensor]]:
    """What `forward` returns, piece by piece: the inputs, the entrance, each block, the head.

    With `media` the entrance comes in three: the tokens' embeddings, the pieces of each medium, and the
    per-layer inputs, where there are any. `names.pieces` says which values are in which.
    Of a piece that has been passed, only the stream and what is still to be borrowed are kept.
    """
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    input_ids, attention_mask = input_ids.to(weights.device), attention_mask.to(weights.device)
    as_text = ids_of_text(weights.towers, input_ids)
    _check_inputs(weights, as_text, attention_mask, images)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    yield inputs if media is None else inputs | token_masks(weights, input_ids)

    def after(found: dict[str, Tensor], name: str) -> Tensor:
        return weights.real(taken(given, name, found[name]))

    # What is given of a piece is asked for before the piece is handed on.
    for_blocks: Tensor | None = None
    if media is None:
        found = entrance(weights, as_text, given=given)
        stream = after(found, "token_embeddings")
        if weights.plan.per_layer_input_size:
            for_blocks = after(found, "per_layer_inputs")
        yield found
    else:
        found = embeddings(weights, as_text, given=given)
        stream = after(found, "token_embeddings")
        by_token = after(found, "per_layer_token_inputs") if weights.plan.per_layer_input_size else None
        yield found
        stream = yield from scattered(weights, media, input_ids, stream, given=given)
        if by_token is not None:
            found = per_layer_inputs(weights, stream, by_token, given=given)
            for_blocks = after(found, "per_layer_inputs")
            yield found

    seen = attention_mask if cache is None else cache.see(attention_mask)
    if images is not None:
        earlier = seen.shape[1] - images.shape[1]  # of whose images no new token is a part
        images = pad(images.to(weights.device), (earlier, 0), value=-1)
    where = sight(weights.plan, seen, input_ids.shape[1], images)
    lent: dict[int, tuple[Tensor, Tensor]] = {}
    for plan in weights.plan.blocks:
        found = block(
            weights,
            plan.index,
            stream,
            where,
            per_layer_input=None if for_blocks is None else for_blocks[:, :, plan.index],
            borrowed=lent.get(plan.kv_source),
            cache=cache,
            given=given,
        )
        at = f"layers[{plan.index}]"
        stream = after(found, f"{at}.layer_output")
        if plan.kv_borrowers:
            # Its own, not those that it attends with: these are private to the block.
            own = [after(found, f"{at}.self_attn.own_{kind}") for kind in ("keys", "values")]
            lent[plan.index] = (own[0], own[1]) if cache is None else cache.of(plan.index)
        # Who waits for the next piece is not to hold this one.
        handed = [found]
        del found
        yield handed.pop()
    yield head(weights, stream, given=given)


def entrance(weights: Weights, input_ids: Tokens, *, given: Given | None = None) -> dict[str, Tensor]:
    """What the tokens of a text are before the first block, by name: their embeddings and per-layer inputs.

    given: see `block`.
    """
    found = embeddings(weights, input_ids, given=given)
    if weights.plan.per_layer_input_size is not None:
        stream, by_token = (
            weights.real(taken(given, name, found[name]))
            for name in ("token_embeddings", "per_layer_token_inputs")
        )
        found |= per_layer_inputs(weights, stream, by_token, given=given)
    return found


def embeddings(weights: Weights, input_ids: Tokens, *, given: Given | None = None) -> dict[str, Tensor]:
    """What is looked up for each token, by name."""
    plan, steps = weights.plan, Steps("", given, weights.real)
    steps("token_embeddings", _looked_up(weights, "embed_tokens", plan.hidden_size, input_ids))
    if (size := plan.per_layer_input_size) is not None:
        by_token = _looked_up(weights, "embed_tokens_per_layer", size, input_ids)
        steps("per_layer_token_inputs", by_token.unflatten(-1, (plan.num_layers, size)))
    return steps.found


def per_layer_inputs(
    weights: Weights, stream: Residual, by_token: PerLayerInputs, *, given: Given | None = None
) -> dict[str, Tensor]:
    """The per-layer inputs, by name, from the stream that enters the first block and the tokens' own half."""
    steps = Steps("", given, weights.real)
    context = steps("per_layer_context_inputs", _context_inputs(weights, stream))
    steps("per_layer_inputs", residual(1, context, by_token) * 2**-0.5)
    return steps.found


def head(weights: Weights, stream: Residual, *, given: Given | None = None) -> dict[str, Tensor]:
    """The model's answer to the stream that leaves the last block, by name.

    given: see `block`.
    """
    plan, steps = weights.plan, Steps("", given, weights.real)
    x = rmsnorm(plan.norm_eps, weights.real(stream), weights["model.norm.weight"])
    raw = torch.cat([lm_head(1, None, rows, x) for rows in weights.head.split(_HEAD_ROWS)], -1)
    raw = steps("raw_logits", raw)
    logits = steps("logits", raw if plan.logit_cap is None else softcap(plan.logit_cap, raw))
    steps("next_token_probs", softmax(logits[:, -1]))
    return steps.found


def _looked_up(weights: Weights, name: str, width: int, input_ids: Tokens) -> Tensor:
    table = weights[f"model.{name}.weight"]
    return embed(_embedding_scale(width, table.dtype), table, input_ids)


def _embedding_scale(width: int, dtype: torch.dtype) -> float:
    # transformers holds the scale in float32 and rounds it to the table's precision: in bfloat16 the root
    # of 3072, 55.43, is 55.5. It multiplies so when the model is trained, too.
    return torch.tensor(width**0.5, dtype=torch.float32).to(dtype).item()


def _context_inputs(weights: Weights, embeddings: Residual) -> PerLayerInputs:
    plan = weights.plan
    projected = linear(weights["model.per_layer_model_projection.weight"], embeddings)
    projected = (projected * plan.hidden_size**-0.5).unflatten(-1, (plan.num_layers, -1))
    return rmsnorm(plan.norm_eps, projected, weights["model.per_layer_projection_norm.weight"])


def _check_inputs(weights: Weights, input_ids: Tensor, attention_mask: Tensor, images: Tensor | None) -> None:
    if input_ids.dim() != 2 or input_ids.is_floating_point() or not input_ids.numel():
        raise BadArgument(f"input_ids is [batch seq] of token ids, not {_shown(input_ids)}.")
    for name, given in (("attention_mask", attention_mask), ("images", images)):
        if given is not None and given.shape != input_ids.shape:
            raise BadArgument(
                f"{name} is {_shown(given)}; beside input_ids of {_shown(input_ids)} it is [batch seq] too."
            )
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= weights.plan.vocab_size:
        raise BadArgument(
            f"input_ids go from {low} to {high}; the vocabulary is 0 to {weights.plan.vocab_size - 1}."
        )


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
