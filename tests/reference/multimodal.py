"""Prompts with images, frames of video and sounds for the tiny wrappers, and what transformers makes of them.

What a wrapper computes is read by plain PyTorch hooks on its modules, and by a function in the place of the
eager attention: nothing of `gemloupe` stands between.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedModel

from gemloupe.plan import ModelPlan, plan
from gemloupe.reference import Media, Towers, Weights, parts, runs_of_media, towers
from gemloupe.reference.towers import AudioTower, PatchEmbedder, VisionTower
from gemloupe.testing import tiny_config, tiny_module
from tests.core.models import BOS, SEED
from tests.reference.served import branches_clearly, routes_clearly
from tests.reference.served import difference as of_text

State = dict[str, Tensor]

# Columns and rows of soft tokens. The longest is padded too.
IMAGES: Final = ((3, 2), (2, 2), (4, 1))
FRAMES: Final = ((2, 2), (2, 2))
SOFT_TOKENS: Final = 7
# Frames of sound that are real, of so many: after the subsampling of the towers 11 and 7 of 11. The last of
# them sees no real frame.
SOUNDS: Final = (44, 27)
RAW_SOUNDS: Final = (9, 5)
KINDS: Final = {"image": 1, "video": 2, "audio": 3}
# transformers 5.20 asks for the count of a video's frames where its own forward hands none on.
TAKES_FRAMES: Final = "num_frames_per_video" in inspect.signature(Gemma4UnifiedModel.forward).parameters
FEATURES: Final = {
    "image": "vision.image_features",
    "video": "vision.video_features",
    "audio": "audio.audio_features",
}


@dataclass(frozen=True)
class Case:
    """One wrapper and one prompt with media."""

    shape: str
    media: tuple[str, ...] = ("image", "video", "audio")
    dtype: torch.dtype = torch.float32
    experts: str | None = None
    fields: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    """Of the towers' configs, what is not the tiny shape's: (("audio_config", (("chunk", 3),)),)."""

    def __str__(self) -> str:
        return "-".join([self.shape, *self.media])

    @cached_property
    def module(self) -> Any:
        config = tiny_config(self.shape, wrapper=True)
        for of, fields in self.fields:
            stored = getattr(config, of).to_dict() | dict(fields)
            setattr(config, of, type(getattr(config, of))(**stored))
        return tiny_module(
            self.shape,
            config=config,
            seed=SEED,
            dtype=self.dtype,
            attn_implementation="eager",
            experts_implementation=self.experts,
        )

    @property
    def config(self) -> Any:
        return self.module.config

    @cached_property
    def plan(self) -> ModelPlan:
        return plan(self.config)

    @cached_property
    def towers(self) -> Towers:
        found = towers(self.config)
        assert found is not None
        return found

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.config, self.module.state_dict())

    @property
    def kinds(self) -> tuple[str, ...]:
        lacking = {
            "audio": self.towers.audio is None,
            "video": not TAKES_FRAMES,
        }
        return tuple(kind for kind in self.media if not lacking.get(kind))

    @cached_property
    def encoding(self) -> State:
        """A prompt on which float32 can be held to the definitions; see `served.Case.inputs`."""
        for salt in count():
            encoding = prompt(self.towers, self.kinds, salt)
            values = computed(self.weights, encoding)
            # Of so many tokens one always has a small branch: what is allowed is more than of text alone.
            if all(
                routes_clearly(self.plan, values, i) and branches_clearly(self.weights, values, i, least=0.05)
                for i in range(self.plan.num_layers)
            ):
                return encoding
        raise AssertionError

    @cached_property
    def served(self) -> State:
        return run(self.module, self.towers, self.encoding)

    @cached_property
    def expected(self) -> State:
        return computed(self.weights, self.encoding)


@cache
def case(shape: str, *media: str, **fields: Any) -> Case:
    """The case with these media, all if none is named, one for the whole session."""
    return Case(shape, media or ("image", "video", "audio"), **fields)


def difference(case: Case, name: str, served: Tensor, expected: Tensor) -> float:
    """The largest difference in units of the largest magnitude; of the text's values on real tokens."""
    if not name.startswith(("vision", "projector", "audio")):
        return of_text(name, served, expected, case.encoding["attention_mask"])
    if not expected.is_floating_point():
        return 0.0 if torch.equal(served, expected) else torch.inf
    assert served.shape == expected.shape, name
    served = served.double()
    if name.endswith("attention_scores"):
        seen = expected > -torch.inf
        assert torch.equal(served > -torch.inf, seen), name
        served, expected = served[seen], expected[seen]
    return ((served - expected).abs().max() / expected.abs().max()).item()


def computed(weights: Weights, encoding: State, **options: Any) -> State:
    """What the reference makes of a prompt."""
    kinds = encoding.get("mm_token_type_ids")
    values: State = {}
    for part in parts(
        weights,
        encoding["input_ids"],
        encoding["attention_mask"],
        images=None if kinds is None else runs_of_media(kinds),
        media=Media.of(encoding),
        **options,
    ):
        values |= {name: value for name, value in part.items() if name not in values}
    return values


# ---- the prompts ------------------------------------------------------------------------------------------


def prompt(towers: Towers, kinds: Sequence[str], salt: int = 0) -> State:
    """Two rows of text, padded on the left, between which the media are spread."""
    random = torch.Generator().manual_seed(1000 * SEED + salt)
    encoding: State = {}
    counts: dict[str, list[int]] = {}
    if "image" in kinds:
        pixels, places = patches(towers, IMAGES, random)
        encoding |= {"pixel_values": pixels, "image_position_ids": places}
        counts["image"] = [columns * rows for columns, rows in IMAGES]
    if "video" in kinds:
        pixels, places = patches(towers, FRAMES, random)
        encoding |= {"pixel_values_videos": pixels, "video_position_ids": places}
        encoding["num_frames_per_video"] = torch.tensor([len(FRAMES)])
        counts["video"] = [columns * rows for columns, rows in FRAMES]
    if "audio" in kinds:
        sounds, real = sound(towers, random)
        encoding |= {"input_features": sounds, "input_features_mask": real}
        counts["audio"] = [
            int(row[:: 4 if isinstance(towers.audio, AudioTower) else 1].sum()) for row in real
        ]
    return encoding | text(towers, counts, random)


def text(towers: Towers, counts: dict[str, list[int]], random: torch.Generator) -> State:
    """The first medium of each kind in the first row, the others in the second; two images touch."""
    tokens = {"image": towers.image_token, "video": towers.video_token, "audio": towers.audio_token}
    rows: list[list[int]] = [[BOS], [BOS]]
    types: list[list[int]] = [[0], [0]]

    def words(row: int, many: int) -> None:
        rows[row] += torch.randint(20, 260, (many,), generator=random).tolist()
        types[row] += [0] * many

    for row, which in enumerate((slice(0, 1), slice(1, None))):
        words(row, 3 - row)
        for kind, sizes in counts.items():
            for size in sizes[which]:
                rows[row] += [tokens[kind] or 0] * size
                types[row] += [KINDS[kind]] * size
            words(row, 2)
    width = max(map(len, rows))
    ids, kinds, mask = (torch.zeros(2, width, dtype=torch.int64) for _ in range(3))
    for row, (given, kind) in enumerate(zip(rows, types, strict=True)):
        ids[row, -len(given) :], kinds[row, -len(given) :] = torch.tensor(given), torch.tensor(kind)
        mask[row, -len(given) :] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        "mm_token_type_ids": kinds,
    }


def patches(
    towers: Towers, sizes: Sequence[tuple[int, int]], random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random pixels and their places, the rest of each image's rows padding at (-1, -1)."""
    vision = towers.vision
    assert vision is not None
    pooling = vision.pooling if isinstance(vision, VisionTower) else 1
    total = SOFT_TOKENS * pooling**2
    pixels = torch.zeros(len(sizes), total, 3 * vision.patch_size**2)
    places = torch.full((len(sizes), total, 2), -1)
    for image, (columns, rows) in enumerate(sizes):
        grid = torch.cartesian_prod(torch.arange(rows * pooling), torch.arange(columns * pooling)).flip(-1)
        pixels[image, : len(grid)] = torch.rand(len(grid), pixels.shape[-1], generator=random)
        places[image, : len(grid)] = grid
    return pixels, places


def sound(towers: Towers, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two sounds of unequal length, the second padded at its end with what is not zero."""
    audio = towers.audio
    assert audio is not None
    lengths = SOUNDS if isinstance(audio, AudioTower) else RAW_SOUNDS
    size = audio.channels[0] if isinstance(audio, AudioTower) else audio.output_size
    sounds = torch.randn(len(lengths), max(lengths), size, generator=random)
    return sounds, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


# ---- what transformers makes of them ----------------------------------------------------------------------


def run(module: Any, towers: Towers, encoding: State) -> State:
    """Every value of one forward that a hook on a module meets, by its standard name.

    Of the vision tower's passes the first is kept, but for the features.
    """
    found: State = {}
    with hooked(module, towers, found), scattered(module, found), attended(found), torch.no_grad():
        found["logits"] = module(**encoding).logits
    return found


@contextmanager
def hooked(module: Any, towers: Towers, found: State) -> Iterator[None]:
    handles: list[Any] = []

    def keep(name: str, value: Tensor) -> None:
        found.setdefault(name, value.detach().clone())

    def after(path: str, name: str, of: Callable[[Any], Tensor] = lambda output: output) -> None:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            keep(name, of(output))

        handles.append(module.get_submodule(path).register_forward_hook(hook))

    def before(path: str, name: str) -> None:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            given = [kwargs[key] for key in ("inputs_embeds", "hidden_states") if key in kwargs]
            keep(name, args[0] if args else given[0])

        handles.append(module.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True))

    def added(path: str, name: str) -> None:
        def hook(_module: nn.Module, args: Any, output: Any) -> None:
            keep(name, output - args[0])

        handles.append(module.get_submodule(path).register_forward_hook(hook))

    stack = "model.language_model"
    after(f"{stack}.embed_tokens", "token_embeddings")
    text = module.config.get_text_config()
    if getattr(text, "hidden_size_per_layer_input", 0):
        shape = (text.num_hidden_layers, text.hidden_size_per_layer_input)
        after(
            f"{stack}.embed_tokens_per_layer", "per_layer_token_inputs", lambda out: out.unflatten(-1, shape)
        )
        after(f"{stack}.per_layer_projection_norm", "per_layer_context_inputs")
    for index in range(text.num_hidden_layers):
        before(f"{stack}.layers.{index}", f"layers[{index}].layer_input")
        after(f"{stack}.layers.{index}", f"layers[{index}].layer_output")
    after("lm_head", "raw_logits")

    if isinstance(towers.vision, VisionTower):
        tower = "model.vision_tower"
        after(f"{tower}.patch_embedder.input_proj", "vision.patch_embeddings")
        for index in range(towers.vision.num_layers):
            at, name = f"{tower}.encoder.layers.{index}", f"vision.layers[{index}]"
            before(at, f"{name}.layer_input")
            after(f"{at}.input_layernorm", f"{name}.self_attn.attention_input")
            after(f"{at}.self_attn.o_proj", f"{name}.self_attn.attention_projection")
            after(f"{at}.post_attention_layernorm", f"{name}.self_attn.attention_output")
            before(f"{at}.pre_feedforward_layernorm", f"{name}.mid_stream")
            after(f"{at}.pre_feedforward_layernorm", f"{name}.mlp.mlp_input")
            before(f"{at}.mlp.down_proj", f"{name}.mlp.mlp_neurons")
            after(f"{at}.mlp.down_proj", f"{name}.mlp.mlp_projection")
            after(f"{at}.post_feedforward_layernorm", f"{name}.mlp.mlp_output")
            after(at, f"{name}.layer_output")
        before(f"{tower}.pooler", "vision.tower_output")
        before("model.embed_vision", "projector.soft_tokens")
    elif isinstance(towers.vision, PatchEmbedder):
        after("model.embed_vision.patch_ln2", "vision.patch_embeddings")
        after("model.embed_vision.pos_norm", "vision.tower_output")
    if isinstance(towers.audio, AudioTower):
        tower = "model.audio_tower"
        after(f"{tower}.subsample_conv_projection", "audio.frame_embeddings", lambda out: out[0])
        after(f"{tower}.subsample_conv_projection", "audio.frame_mask", lambda out: out[1])
        for index in range(towers.audio.num_layers):
            at, name = f"{tower}.layers.{index}", f"audio.layers[{index}]"
            before(f"{at}.feed_forward1", f"{name}.layer_input")
            added(f"{at}.lconv1d", f"{name}.lconv1d.convolution_output")
            after(f"{at}.norm_post_attn", f"{name}.self_attn.attention_output")
            for of in ("feed_forward1", "feed_forward2"):
                weight = towers.audio.residual_weight
                # The norm's output is multiplied in place after its hooks.
                after(f"{at}.{of}.post_layer_norm", f"{name}.{of}.mlp_output", lambda out, w=weight: out * w)
            after(at, f"{name}.layer_output")
        before(f"{tower}.output_proj", "audio.tower_output")
        before("model.embed_audio", "audio_projector.soft_tokens")
    elif towers.audio is not None:
        before("model.embed_audio", "audio.tower_output")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def scattered(module: Any, found: State) -> Iterator[None]:
    """The features are kept as the scatter receives them."""
    tokens = {name: getattr(module.config, f"{kind}_token_id") for kind, name in FEATURES.items()}
    original, ids = Tensor.masked_scatter, {}

    def remember(_module: nn.Module, args: Any, kwargs: Any) -> None:
        ids["input_ids"] = kwargs["input_ids"]

    def recording(stream: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        if mask.shape == stream.shape:
            for name, token in tokens.items():
                if torch.equal(mask[..., 0], ids["input_ids"] == token):
                    found[name] = source.detach().clone()
        return original(stream, mask, source)

    handle = module.model.register_forward_pre_hook(remember, with_kwargs=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "masked_scatter", recording)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def attended(found: State) -> Iterator[None]:
    """What the vision tower's attention is called with, and what it answers."""
    original: Any = modeling_gemma4.eager_attention_forward

    def recording(of: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        output, weights = original(of, query, key, value, mask, **options)
        if type(of).__name__ == "Gemma4VisionAttention":
            at = f"vision.layers[{of.layer_idx}].self_attn"
            scores = query @ key.repeat_interleave(of.num_key_value_groups, 1).mT * options["scaling"]
            if mask is not None:
                scores = scores.masked_fill(mask < 0, -torch.inf)
            for name, kept in {
                "own_keys": key,
                "own_values": value,
                "attention_queries": query,
                "attention_keys": key,
                "attention_values": value,
                "attention_scores": scores,
                "attention_probabilities": weights,
                "attention_head_outputs": output,
            }.items():
                found.setdefault(f"{at}.{name}", kept.detach().clone())
        return output, weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gemma4, "eager_attention_forward", recording)
        yield
