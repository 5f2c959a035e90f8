"""Every trap of the card is looked for in transformers' own model: a sentence that is not so fails here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from gemloupe.plan import ModelPlan, plan
from gemloupe.served import served_values
from gemloupe.standardized import StandardizedTransformer
from gemloupe.support import HOSTS
from gemloupe.testing import SHAPES, tiny_config, tiny_module, tiny_tokenizer
from gemloupe.traps import traps
from tests.media.given import with_video
from tests.test_plan import PUBLISHED
from tests.test_testing import audio_inputs, image_inputs

IDS: Final = torch.tensor([[2, 50, 51, 52, 53, 54, 55, 56, 57, 58]])


def trap(model: PreTrainedModel, pattern: str) -> re.Match[str] | None:
    """The one trap of the model that the pattern is found in."""
    found = [match for text in traps(plan(model.config)) if (match := re.search(pattern, text))]
    assert len(found) <= 1
    return found[0] if found else None


def numbers(text: str) -> list[int]:
    """`3-5, 9` as 3, 4, 5, 9."""
    return [
        number
        for part in text.split(", ")
        for number in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)
    ]


def outputs(module: torch.nn.Module) -> list[Any]:
    """What the module will answer, call by call."""
    kept: list[Any] = []
    module.register_forward_hook(lambda _module, _args, output: kept.append(output))
    return kept


def inputs(module: torch.nn.Module) -> list[Any]:
    """The first argument that the module will be given, call by call."""
    kept: list[Any] = []
    module.register_forward_pre_hook(lambda _module, args: kept.append(args[0]))
    return kept


each_shape = pytest.mark.parametrize("shape", SHAPES)


@each_shape
@pytest.mark.parametrize("wrapper", [False, True])
def test_a_trap_names_only_what_there_is(shape: str, wrapper: bool):
    facts = {"head_dim", "num_kv_heads", "intermediate_size", "layer_scalar"}  # attributes of a block
    modules = {"lm_head", "q_norm", "k_norm", "k_proj", "v_proj", "v_norm(k_proj(x))"}
    calls = {"generate", "full_prefill=False", "project_on_vocab", "mm_token_type_ids"}
    values = {name for kind in HOSTS.values() for name in served_values(kind)}
    sentences = traps(plan(tiny_config(shape, wrapper=wrapper)))
    assert len(sentences) == len(set(sentences)) >= 7
    for sentence in sentences:
        assert set(re.findall("`(.+?)`", sentence)) <= facts | modules | calls | values
        assert sentence.endswith(".")


@each_shape
def test_layer_scalar_multiplies_the_sum(shape: str):
    model = tiny_module(shape)
    assert trap(model, "`layer_scalar` multiplies the whole sum")
    before = model(IDS, output_hidden_states=True).hidden_states[1]
    model.model.layers[0].layer_scalar *= 2
    assert torch.equal(model(IDS, output_hidden_states=True).hidden_states[1], 2 * before)


@each_shape
def test_who_computes_no_keys(shape: str):
    model = tiny_module(shape)
    found = trap(
        model,
        r"computed on blocks (.+), which attend with block (\d+)'s on sliding ones and block (\d+)'s on",
    )
    without = [i for i, layer in enumerate(model.model.layers) if not hasattr(layer.self_attn, "k_proj")]
    assert without == (numbers(found[1]) if found else [])
    if found is None:
        return
    # A source's keys reach its borrowers: zero them by a hook, and their patterns change.
    model.set_attn_implementation("eager")
    before = model(IDS, output_attentions=True).attentions
    for source, kind in ((int(found[2]), "sliding_attention"), (int(found[3]), "full_attention")):
        changed = _patterns_without_keys(model, source)
        theirs = [i for i in without if model.config.layer_types[i] == kind]
        assert theirs
        uniform = [torch.equal(changed[i] > 0, before[i] > 0) and _is_uniform(changed[i]) for i in theirs]
        assert all(uniform)
        others = [i for i in without if i not in theirs]
        assert not any(_is_uniform(changed[i]) for i in others)


def _patterns_without_keys(model: PreTrainedModel, source: int) -> Any:
    norm = model.model.layers[source].self_attn.k_norm
    handle = norm.register_forward_hook(lambda _module, _args, output: torch.zeros_like(output))
    try:
        return model(IDS, output_attentions=True).attentions
    finally:
        handle.remove()


def _is_uniform(pattern: torch.Tensor) -> bool:
    seen = (pattern > 0).sum(-1, keepdim=True)
    return torch.allclose(pattern, (pattern > 0) / seen)


@each_shape
def test_who_sees_one_row_of_the_prompt(shape: str):
    model: Any = tiny_module(shape)
    found = trap(model, r"transformers, since 5.23, runs blocks (.+) on the last position of")
    streams = [outputs(layer) for layer in model.model.layers]
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    rows = [stream[0].shape[1] for stream in streams]
    sliced = numbers(found[1]) if found and Version(transformers.__version__) >= Version("5.23") else []
    assert [i for i, seen in enumerate(rows) if seen == 1] == sliced
    assert set(rows) <= {1, IDS.shape[1]}
    wrapped = StandardizedTransformer(tiny_module(shape), tokenizer=tiny_tokenizer())
    for options, expected in (({}, [IDS.shape[1]] * len(rows)), ({"full_prefill": False}, rows)):
        assert _rows_in_a_trace(wrapped, options) == expected


def _rows_in_a_trace(model: Any, options: dict[str, Any]) -> list[int]:
    rows = []
    with model.generate(IDS, max_new_tokens=2, do_sample=False, **options):
        rows.extend(layer.layer_output.shape[1] for layer in model.layers)
    return rows


@each_shape
def test_where_values_come_from_keys(shape: str):
    model = tiny_module(shape)
    found = trap(model, "Full blocks have no `v_proj`")
    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        attention = layer.self_attn
        if not hasattr(attention, "k_proj"):
            continue
        assert (attention.v_proj is None) == (found is not None and kind == "full_attention")
        if attention.v_proj is None:
            projected, normed = outputs(attention.k_proj), inputs(attention.v_norm)
            model(IDS)
            assert torch.equal(projected[0].flatten(), normed[0].flatten())


@each_shape
def test_the_sizes_of_heads(shape: str):
    model = tiny_module(shape)
    sizes: dict[str, tuple[int, int, int]] = {}
    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        width = layer.self_attn.head_dim
        if hasattr(layer.self_attn, "k_proj"):
            kv_heads = layer.self_attn.k_proj.out_features // width
            sizes[kind.removesuffix("_attention")] = (width, kv_heads, layer.self_attn.q_proj.out_features)
    (width, kv_heads, all_heads), (full_width, full_kv_heads, all_full_heads) = (
        sizes["sliding"],
        sizes["full"],
    )
    assert trap(model, f"`head_dim` is {width} on sliding blocks and {full_width} on full ones")
    assert trap(model, f"together are {all_heads} on sliding blocks and {all_full_heads} on full ones")
    said = trap(model, f"`num_kv_heads` is {kv_heads} on sliding blocks and {full_kv_heads} on full ones")
    assert (said is not None) == (kv_heads != full_kv_heads)


@each_shape
def test_who_has_a_wider_mlp(shape: str):
    model = tiny_module(shape)
    widths = [layer.mlp.gate_proj.out_features for layer in model.model.layers]
    found = trap(model, r"The MLP is (\d+) wide on blocks (.+) and (\d+) elsewhere")
    assert (found is not None) == (len(set(widths)) > 1)
    if found:
        wide = numbers(found[2])
        expected = [int(found[1]) if i in wide else int(found[3]) for i in range(len(widths))]
        assert widths == expected


def test_transformers_router_logits_are_probabilities():
    model = tiny_module("26b-a4b")
    found = trap(model, r"goes to (\d+) of (\d+) experts")
    assert found
    assert "what transformers calls so are probabilities" in found.string
    answers = outputs(model.model.layers[0].router)
    for routed in model(IDS, output_router_logits=True).router_logits:
        assert torch.allclose(routed.sum(-1), torch.ones(routed.shape[:-1]))
        assert routed.shape[-1] == int(found[2])
    assert answers[0][2].shape[-1] == int(found[1])
    assert trap(tiny_module("e2b"), "experts") is None


@each_shape
def test_the_soft_cap(shape: str):
    model = tiny_module(shape)
    raw = outputs(model.lm_head)
    logits = model(IDS).logits
    found = trap(model, r"soft-capped, (\d+) \* tanh\(raw / (\d+)\)")
    assert found
    assert torch.allclose(logits, int(found[1]) * torch.tanh(raw[0] / int(found[2])))
    assert trap(tiny_module(shape, final_logit_softcapping=None), "capped") is None


@each_shape
def test_the_scale_of_the_embeddings(shape: str):
    model = tiny_module(shape)
    found = trap(model, r"`token_embeddings` are scaled by sqrt\(\d+\) = (.+)\.$")
    assert found
    embedding = model.model.embed_tokens
    assert torch.allclose(embedding(IDS) / embedding.weight[IDS], torch.tensor(float(found[1])), atol=0.01)


@each_shape
def test_what_an_image_puts_into_the_stream_is_not_scaled(shape: str):
    model = tiny_module(shape, wrapper=True)
    assert trap(model, r"scaled by sqrt\(\d+\) = [\d.]+, what an image puts in their place is not\.$")
    assert trap(tiny_module(shape), "what an image puts") is None
    given = image_inputs(shape)
    features, stream = outputs(model.model.embed_vision), inputs(model.model.language_model.layers[0])
    model(**given)
    slots = given["input_ids"] == model.config.image_token_id
    # The unified model's embedder answers with a ModelOutput, whose tokens are cut by image afterwards.
    soft_tokens = torch.cat([*getattr(features[0], "pooler_output", features[0])])
    assert torch.equal(stream[0][slots].flatten(), soft_tokens.flatten())


@each_shape
def test_the_tied_head(shape: str):
    model = tiny_module(shape)
    assert trap(model, "`lm_head` has the embedding's own weight")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = tiny_module(shape, tie_word_embeddings=False)
    assert trap(untied, "`lm_head`") is None
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


@each_shape
@pytest.mark.parametrize("wrapper", [False, True])
def test_which_tokens_see_ahead(shape: str, wrapper: bool):
    model = tiny_module(shape, wrapper=wrapper, attn_implementation="eager")
    found = trap(model, "in both directions, on (every block|sliding blocks alone).*`mm_token_type_ids`")
    image = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 0, 0]])
    given = {"mm_token_type_ids": image} if wrapper else {}
    seen = [bool((p[0, :, 2, 4] > 0).all()) for p in model(IDS, output_attentions=True, **given).attentions]
    expected = {"every block": ("sliding", "full"), "sliding blocks alone": ("sliding",)}
    kinds = expected[found[1]] if found else ()
    assert seen == [block.kind in kinds for block in plan(model.config).blocks]
    causal = [bool((p.triu(1) == 0).all()) for p in model(IDS, output_attentions=True).attentions]
    assert all(causal)


@each_shape
def test_scores_are_not_scaled(shape: str):
    model = tiny_module(shape)
    assert trap(model, "not divided by sqrt")
    assert {layer.self_attn.scaling for layer in model.model.layers} == {1.0}


@each_shape
def test_which_coordinates_turn(shape: str):
    model = tiny_module(shape)
    found = trap(
        model, r"On full blocks (\d+) of a head's (\d+) coordinates turn .+: (\d+-\d+) and (\d+-\d+)\."
    )
    assert found
    _, sin = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([[1]]), "full_attention")
    turning = sin[0, 0].nonzero().flatten().tolist()
    assert turning == [*numbers(found[3]), *numbers(found[4])]
    assert (len(turning), sin.shape[-1]) == (int(found[1]), int(found[2]))


@pytest.mark.parametrize("shape", ["e2b", "e4b"])
def test_what_replaces_a_token(shape: str):
    model = StandardizedTransformer(tiny_module(shape), tokenizer=tiny_tokenizer())
    assert trap(
        tiny_module(shape), "to replace a token, write `token_embeddings` and `per_layer_token_inputs`"
    )
    other = IDS.clone()
    other[0, 4] = 99
    with model.trace(other):
        embeddings = model.token_embeddings.save()
        per_layer = model.per_layer_token_inputs.save()
        expected = model.logits.save()
    with model.trace(IDS):
        model.token_embeddings[:] = embeddings
        half = model.logits.save()
    with model.trace(IDS):
        model.token_embeddings[:] = embeddings
        model.per_layer_token_inputs[:] = per_layer
        whole = model.logits.save()
    assert torch.equal(whole, expected)
    assert not torch.equal(half, expected)


@pytest.mark.parametrize("shape", ["e2b", "e4b"])
def test_an_image_takes_the_pad_tokens_per_layer_embedding(shape: str):
    model = tiny_module(shape, wrapper=True)
    assert trap(model, "An image's slots take the pad token's")
    fed = inputs(model.model.language_model.embed_tokens_per_layer)
    ids = IDS.clone()
    ids[0, 3:5] = model.config.image_token_id
    model(ids)
    assert (fed[0] == model.config.text_config.pad_token_id).nonzero().tolist() == [[0, 3], [0, 4]]
    assert trap(tiny_module(shape), "An image's slots") is None
    assert trap(tiny_module("12b", wrapper=True), "per-layer embedding") is None


@each_shape
def test_images_that_touch_are_one(shape: str):
    model = tiny_module(shape, wrapper=True, attn_implementation="eager")
    found = trap(model, "no token between them are one image to that mask")
    assert trap(tiny_module(shape), "no token between them") is None
    frame, video = (
        torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 0, 0]]),
        torch.tensor([[0, 0, 1, 1, 2, 2, 0, 0, 0, 0]]),
    )
    between = torch.tensor([[0, 0, 1, 1, 0, 1, 0, 0, 0, 0]])
    for types, merged in ((frame, True), (video, True), (between, False)):
        pattern = model(IDS, output_attentions=True, mm_token_type_ids=types).attentions[0]
        assert bool((pattern[0, :, 2, 5] > 0).all()) == (merged and found is not None)


@each_shape
def test_padded_rows_run_like_the_others(shape: str):
    model = tiny_module(shape, wrapper=True)
    assert trap(tiny_module(shape), "pads every image") is None
    found = trap(model, "padded rows run through (every block of the tower|the embedder) like the others")
    assert found
    given, inner = image_inputs(shape), model.model
    pixels, places = given["pixel_values"], given["image_position_ids"]
    padding = (0, 0, 0, 4)
    given["pixel_values"] = torch.nn.functional.pad(pixels, padding)
    given["image_position_ids"] = torch.nn.functional.pad(places, padding, value=-1)
    if shape == "12b":
        assert found[1] == "the embedder"
        streams = [outputs(inner.embed_vision.pos_norm)]
    else:
        assert found[1] == "every block of the tower"
        streams = [outputs(layer) for layer in inner.vision_tower.encoder.layers]
    stream = inputs(inner.language_model.layers[0])
    model(**given)
    for (kept,) in streams:
        assert kept.shape[1] == pixels.shape[1] + 4
        assert bool((kept[0, -4:].abs().amax(-1) > 0).all())
    model(**given | {"pixel_values": pixels, "image_position_ids": places})
    assert torch.allclose(stream[0], stream[1], atol=1e-5)  # the padding made no soft token, and moved none


@with_video
@each_shape
def test_the_tower_runs_on_images_and_then_on_frames(shape: str):
    model: Any = tiny_module(shape, wrapper=True)
    assert trap(tiny_module(shape), "runs twice") is None
    found = trap(model, "The (tower|embedder) runs twice in a call with images and video, on the frames last")
    assert found
    assert found[1] == ("embedder" if shape == "12b" else "tower")
    given = image_inputs(shape)
    embedder = model.model.embed_vision if shape == "12b" else model.model.vision_tower.patch_embedder
    pixels = inputs(embedder.patch_ln1 if shape == "12b" else embedder)
    ids, frames = given["input_ids"], given["pixel_values"].flip(-1)
    video = torch.where(ids == model.config.image_token_id, model.config.video_token_id, ids)
    model(
        **given | {"input_ids": torch.cat([ids, video[:, 1:]], -1)},
        pixel_values_videos=frames,
        video_position_ids=given["image_position_ids"],
        num_frames_per_video=torch.tensor([1]),
    )
    first, second = pixels
    assert first.shape == second.shape
    assert torch.equal(first, given["pixel_values"])
    assert torch.equal(second, frames)


@each_shape
def test_images_and_sound_in_generate(shape: str):
    model: Any = tiny_module(shape, wrapper=True)
    hears = model.config.audio_config is not None
    media = "images and sound" if hears else "images"
    assert trap(model, f"In `generate` {media} are computed in the first step alone")
    assert trap(tiny_module(shape), "first step alone") is None
    seen = outputs(model.model.embed_vision)
    heard = outputs(model.model.embed_audio) if hears else []
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    model.generate(**image_inputs(shape), **options)
    if hears:
        model.generate(**audio_inputs(shape), **options)
    assert (len(seen), len(heard)) == (1, int(hears))


# ---- the published checkpoints ----------------------------------------------------------------------------

SAID: Final[dict[str, tuple[str, ...]]] = {
    "E2B": (
        "computed on blocks 15-34, which attend with block 13's on sliding ones and block 14's on full ones",
        "The MLP is 12288 wide on blocks 15-34 and 6144 elsewhere",
        "`head_dim` is 256 on sliding blocks and 512 on full ones",
        "together are 2048 on sliding blocks and 4096 on full ones, which is not the hidden size, 1536",
        "sqrt(1536) = 39.19",
        "128 of a head's 512 coordinates turn with the position: 0-63 and 256-319",
    ),
    "E4B": ("computed on blocks 24-41, which attend with block 22's on sliding ones and block 23's on full",),
    "26B-A4B": (
        "goes to 8 of 128 experts",
        "have no `v_proj`",
        "`num_kv_heads` is 8 on sliding blocks and 2 on",
    ),
    "31B": ("together are 8192 on sliding blocks and 16384 on full ones", "have no `v_proj`"),
    "12B": ("`num_kv_heads` is 8 on sliding blocks and 1 on full ones", "have no `v_proj`"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_said_of_the_published_checkpoints(name: str):
    said = " ".join(traps(plan(PUBLISHED[name].text_config())))
    assert [piece for piece in SAID[name] if piece not in said] == []
    assert [other for other in set(SAID) - {name} if all(piece in said for piece in SAID[other])] == []


def changed(**fields: Any) -> Callable[[], ModelPlan]:
    return lambda: plan(tiny_config("e2b", **fields))


@pytest.mark.parametrize(
    ("planned", "said", "unsaid"),
    [
        (
            changed(num_kv_shared_layers=1),
            "computed on block 9, which attend with block 4's on full",
            "blocks 9",
        ),
        (changed(num_kv_shared_layers=0), "", "own_keys"),
        (changed(use_double_wide_mlp=False), "", "The MLP is"),
        (changed(global_head_dim=16), "The heads together are 64, which is not", "`head_dim` is"),
        (changed(head_dim=10, global_head_dim=10), "", "together"),
        (changed(use_bidirectional_attention="all"), "Attention is not causal", "in both directions"),
    ],
)
def test_a_sentence_comes_and_goes_with_what_it_says(
    planned: Callable[[], ModelPlan], said: str, unsaid: str
):
    sentences = " ".join(traps(planned()))
    assert said in sentences
    assert unsaid not in sentences
