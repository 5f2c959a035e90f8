"""The reference's towers and their scatter against transformers' own, read by plain PyTorch hooks."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from gemloupe import StandardizedTransformer
from gemloupe.reference import Media, Weights, names, parts, runs_of_media
from gemloupe.reference.names import pieces
from gemloupe.testing import SHAPES, tiny_tokenizer
from tests.reference.multimodal import TAKES_FRAMES, Case, State, case, computed, difference, run
from tests.reference.test_exact import InFloat64

# In units of each value's largest magnitude. Measured: 1.5e-6 in the towers and 8e-5 in the text, end to end.
IN_TOWERS: Final = 5e-6
END_TO_END: Final = 2e-4
BY_STEP: Final = 5e-6
# In a float64 model in which nothing is rounded to float32.
EXACT: Final = 1e-11
# Of one rounding, 2**-8: between two values that have names a number is rounded up to 13 times.
STEPS_IN_BFLOAT16: Final = 10 * 2**-8

MEDIA: Final = [("image",), ("video",), ("audio",), ("image", "video", "audio")]
WITH_AUDIO: Final = ("e2b", "e4b", "12b")
each_case = pytest.mark.parametrize(
    "case",
    [
        case(shape, *media)
        for shape in SHAPES
        for media in MEDIA
        if (shape in WITH_AUDIO or media != ("audio",)) and (TAKES_FRAMES or media != ("video",))
    ],
    ids=str,
)
each_shape = pytest.mark.parametrize("shape", SHAPES)


def tolerance(name: str) -> float:
    return IN_TOWERS if name.startswith(("vision", "projector", "audio")) else END_TO_END


def too_far(case: Case, served: State, found: State, allowed: float | None = None) -> dict[str, float]:
    far = {name: difference(case, name, value, found[name]) for name, value in served.items()}
    return {name: by for name, by in far.items() if not by <= (allowed or tolerance(name))}


@each_case
def test_every_value_that_a_hook_meets_is_as_defined(case: Case):
    expected = names(case.plan, case.towers, frozenset(case.kinds))
    assert tuple(case.expected) == expected
    # Hooks meet all of the towers' values but the masks, and of the text's the streams.
    of_towers = {n for n in expected if n.startswith(("vision", "projector", "audio")) and "mask" not in n}
    assert of_towers <= case.served.keys() <= set(expected)
    assert not too_far(case, case.served, case.expected)


@each_case
def test_every_value_follows_from_the_models_own_before_it(case: Case):
    found = computed(case.weights, case.encoding, given=case.served)
    own = {name: value for name, value in case.served.items() if not name.startswith("layers")}
    assert not too_far(case, own, found, BY_STEP)


@each_shape
def test_the_values_of_the_text_follow(shape: str):
    one = case(shape)
    model: Any = StandardizedTransformer(one.module, tokenizer=tiny_tokenizer())
    of_text = list(names(one.plan))
    collected = model.collect(one.encoding, of_text)
    assert not too_far(one, {name: collected[name] for name in of_text}, one.expected)


@each_shape
def test_without_token_types_images_are_causal(shape: str):
    one = case(shape)
    causal = {name: value for name, value in one.encoding.items() if name != "mm_token_type_ids"}
    found = computed(one.weights, causal)
    assert not too_far(one, run(one.module, one.towers, causal), found)
    same = torch.equal(found["logits"], one.expected["logits"])
    assert same == (shape in ("e2b", "e4b"))  # whose config lets no token see ahead


@each_shape
def test_every_value_is_the_definitions_to_the_last_digits(shape: str):
    exact = Case(shape, experts="eager" if shape == "26b-a4b" else None)  # grouped_mm refuses float64
    encoding = {
        name: value.double() if value.is_floating_point() else value for name, value in exact.encoding.items()
    }
    module = exact.module.double()
    with InFloat64(), torch.no_grad():
        module._init_weights(module.model.language_model.rotary_emb)
        if (tower := getattr(module.model, "vision_tower", None)) is not None:
            rotary = tower.encoder.rotary_emb
            rotary.inv_freq, _ = rotary.compute_axial_rope_parameters(rotary.config)
        if (tower := getattr(module.model, "audio_tower", None)) is not None:
            count = tower.config.hidden_size // 2
            place = torch.arange(count, dtype=torch.float64)
            tower.rel_pos_enc.inv_timescales = 10_000 ** (-place / (count - 1))[None, None]
        served = run(module, exact.towers, encoding)
    weights = Weights(exact.config, module.state_dict())
    assert not too_far(exact, served, computed(weights, encoding), EXACT)


@each_shape
def test_a_bfloat16_models_steps_are_the_definitions(shape: str):
    low = case(shape, dtype=torch.bfloat16)
    found = computed(low.weights, low.encoding, given=low.served)
    own = {
        name: value for name, value in low.served.items() if not name.startswith(("layers", "raw", "logits"))
    }
    assert not too_far(low, own, found, STEPS_IN_BFLOAT16)


# {what: (the shape, the tower's config, its fields)}, none of which the tiny shapes' own values would show.
VARIANTS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "a small clipping": ("e2b", "audio_config", {"gradient_clipping": 0.7}),
    "a small cap": ("e2b", "audio_config", {"attention_logit_cap": 0.5}),
    "frames ahead": ("e2b", "audio_config", {"attention_context_right": 3}),
    "short chunks": ("e2b", "audio_config", {"attention_chunk_size": 3, "attention_context_left": 8}),
    "long chunks": ("e2b", "audio_config", {"attention_chunk_size": 9, "attention_context_left": 3}),
    "another hidden score": ("e4b", "audio_config", {"attention_invalid_logits_value": -2.0}),
    "another residual": ("e4b", "audio_config", {"residual_weight": 0.3}),
    "a longer kernel": ("e4b", "audio_config", {"conv_kernel_size": 5}),
    "audio's eps": ("e4b", "audio_config", {"rms_norm_eps": 0.3}),
    "sound unclipped": ("e4b", "audio_config", {"use_clipped_linears": False}),
    "vision's eps": ("e2b", "vision_config", {"rms_norm_eps": 0.3}),
    "clipped and standardized": ("e4b", "vision_config", {"standardize": True}),
    "neither": ("31b", "vision_config", {"standardize": False}),
    "shared keys": ("31b", "vision_config", {"num_key_value_heads": 1}),
    "another theta": (
        "31b",
        "vision_config",
        {"rope_parameters": {"rope_type": "axial", "rope_theta": 7.0}},
    ),
    "larger squares": ("26b-a4b", "vision_config", {"pooling_kernel_size": 3}),
    "the patches' eps": ("12b", "vision_config", {"rms_norm_eps": 0.5}),
    "the frames' eps": ("12b", "audio_config", {"rms_norm_eps": 0.5}),
}


@pytest.mark.parametrize("what", VARIANTS)
def test_what_a_config_says_otherwise_is_computed_otherwise(what: str):
    shape, of, fields = VARIANTS[what]
    medium = "audio" if of == "audio_config" else "image"
    other = Case(shape, (medium,), fields=((of, tuple(fields.items())),))
    assert not too_far(other, other.served, other.expected, END_TO_END)
    usual = computed(case(shape, medium).weights, other.encoding) if "larger" not in what else other.expected
    features = "audio.audio_features" if medium == "audio" else "vision.image_features"
    if "larger" not in what and what not in ("sound unclipped", "neither", "clipped and standardized"):
        changed = (usual[features] - other.expected[features]).abs().max() / usual[features].abs().max()
        assert changed > 1e-4


@each_case
def test_the_values_come_in_their_pieces(case: Case):
    found = parts(
        case.weights,
        case.encoding["input_ids"],
        case.encoding["attention_mask"],
        media=Media.of(case.encoding),
    )
    assert [tuple(part) for part in found] == list(pieces(case.plan, case.towers, frozenset(case.kinds)))


def test_runs_of_media_are_transformers_blocks():
    from transformers.models.gemma4.modeling_gemma4 import get_block_sequence_ids_for_mask

    kinds = torch.tensor([[1, 1, 0, 2, 2, 1, 0, 3, 1], [0, 0, 3, 3, 0, 2, 2, 2, 0]])
    expected = get_block_sequence_ids_for_mask(kinds, kinds.device)
    assert torch.equal(runs_of_media(kinds), expected)
    assert expected[0].tolist() == [0, 0, -1, 1, 1, 1, -1, -1, 2]
