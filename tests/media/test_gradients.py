"""The gradient of every value of images, video and sound is the finite difference of writing it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gemloupe.paths import find
from gemloupe.testing import tiny
from tests.core.models import SEED
from tests.media.by_hand import films, pictures, sounds
from tests.media.given import VIDEO, WITH_SOUND, Encoding, mark, paths, soft_tokens, text
from tests.wide import WIDE, all_in_float64  # noqa: F401  # the fixture is used by its name

STEP = 1e-6


@pytest.fixture(autouse=True)
def pooled_in_float64(all_in_float64: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The pooler's weights are counted in float32, and would not multiply float64."""
    one_hot = torch.nn.functional.one_hot
    monkeypatch.setattr(torch.nn.functional, "one_hot", lambda *args: one_hot(*args).to(WIDE))


@cache
def wide(shape: str) -> Any:
    return tiny(shape, wrapper=True, seed=SEED, dtype=WIDE, experts_implementation="eager")


def doubled(encoding: Encoding) -> Encoding:
    return {name: value.double() if value.is_floating_point() else value for name, value in encoding.items()}


@cache
def invokes(shape: str) -> list[Encoding]:
    """Two images; an image and, where the model takes it, a sound; words; video."""
    second, media = [2, 60, *mark("image", 2), 61], pictures(shape, (1, 2), patches=8, seed=4)
    if shape in WITH_SOUND:
        second += [*mark("audio", soft_tokens(shape, 9)), 62]
        media |= sounds(shape, 9)
    given = [
        text([2, *mark("image", 2), 61, *mark("image", 4), 62]) | pictures(shape, (2, 1), (2, 2), patches=20),
        text(second) | media,
        text([2, 60, 61]),
    ]
    if VIDEO:
        words = text([2, 60, *mark("video", 2), 61, *mark("video", 2), 62])
        given.append(words | films(shape, (2, 2, 1), patches=8))
    return [doubled(encoding) for encoding in given]


def loss_of(logits: Tensor, encoding: Encoding) -> Any:
    """A weighted sum of the logits of the real tokens."""
    logits = logits[:, -encoding["input_ids"].shape[1] :]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(SEED), dtype=WIDE)
    return (logits * weights).sum()


def gradients(shape: str, path: str, batch: list[Encoding]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """The value in each invoke that has it, and the gradient there of that invoke's loss."""
    one = wide(shape)
    host, name = find(one, path)[0], path.rpartition(".")[2]
    values: dict[int, Tensor] = {}
    found: dict[int, Tensor] = {}
    if len(batch) == 1:
        with one.trace(**batch[0]):
            value = getattr(host, name)
            values[0] = value.detach().clone()
            loss: Any = loss_of(one.logits, batch[0])
            with loss.backward():
                found[0] = value.grad.clone()
        return values, found
    with one.trace() as tracer:
        for number, encoding in enumerate(batch):
            with tracer.invoke(**encoding):
                if path in paths(one, encoding):
                    value = getattr(host, name)
                    values[number] = value.detach().clone()
                    loss: Any = loss_of(one.logits, encoding)
                    with loss.backward(retain_graph=True):
                        found[number] = value.grad.clone()
    return values, found


@torch.no_grad()
def losses_with(shape: str, path: str, batch: list[Encoding], values: dict[int, Tensor]) -> dict[int, float]:
    """Each invoke's loss in a trace in which each writes its value."""
    one = wide(shape)
    host, name = find(one, path)[0], path.rpartition(".")[2]
    losses: dict[int, float] = {}
    if len(batch) == 1:
        with one.trace(**batch[0]):
            setattr(host, name, values[0])
            losses[0] = loss_of(one.logits, batch[0]).item()
        return losses
    with one.trace() as tracer:
        for number, encoding in enumerate(batch):
            with tracer.invoke(**encoding):
                if number in values:
                    setattr(host, name, values[number])
                losses[number] = loss_of(one.logits, encoding).item()
    return losses


def direction(gradient: Tensor) -> Tensor:
    """Along the gradient and across it, so that neither a wrong size nor a wrong direction is missed."""
    random = torch.Generator().manual_seed(SEED + 1)
    noise = torch.randn(gradient.shape, generator=random, dtype=gradient.dtype)
    return gradient / gradient.norm() + noise / noise.norm()


def check(shape: str, path: str, batch: list[Encoding]) -> None:
    values, found = gradients(shape, path, batch)
    assert values.keys() == found.keys()
    assert values
    along, size = {}, {}
    for number, gradient in found.items():
        value = values[number]
        assert gradient.shape == value.shape
        assert gradient.norm() > 0, (path, number)
        seen = value > -1e30
        along[number] = torch.where(seen, direction(torch.where(seen, gradient, 0)), 0)
        size[number] = STEP * value[seen].norm().item()
    up, down = (
        losses_with(shape, path, batch, {n: v + sign * size[n] * along[n] for n, v in values.items()})
        for sign in (1, -1)
    )
    for number, gradient in found.items():
        predicted = (gradient.nan_to_num() * along[number]).sum().item()
        measured = (up[number] - down[number]) / (2 * size[number])
        assert predicted == pytest.approx(measured, rel=2e-5), (path, number)


VALUES = (
    "vision.patch_embeddings",
    "vision.tower_output",
    "projector.soft_tokens",
    "vision.image_features",
    "vision.video_features",
    "vision.layers[0].layer_input",
    "vision.layers[1].layer_output",
    "vision.layers[0].mid_stream",
    "vision.layers[0].mlp.mlp_neurons",
    "vision.layers[0].mlp.mlp_output",
    "vision.layers[1].self_attn.own_keys",
    "vision.layers[1].self_attn.own_values",
    "vision.layers[1].self_attn.attention_queries",
    "vision.layers[1].self_attn.attention_keys",
    "vision.layers[1].self_attn.attention_values",
    "vision.layers[1].self_attn.attention_scores",
    "vision.layers[1].self_attn.attention_probabilities",
    "vision.layers[1].self_attn.attention_head_outputs",
    "vision.layers[1].self_attn.attention_output",
    "audio.frame_embeddings",
    "audio.layers[0].layer_input",
    "audio.layers[1].feed_forward1.mlp_output",
    "audio.layers[1].self_attn.attention_output",
    "audio.layers[1].lconv1d.convolution_output",
    "audio.layers[1].feed_forward2.mlp_output",
    "audio.layers[1].layer_output",
    "audio.tower_output",
    "audio_projector.soft_tokens",
    "audio.audio_features",
)


@pytest.mark.parametrize("path", VALUES)
@pytest.mark.parametrize("shape", ["e2b", "31b", "12b"])
def test_a_gradient_is_the_finite_difference(shape, path):
    if not wide(shape).has(path) or not (VIDEO or not path.endswith("video_features")):
        pytest.skip(f"no forward of {shape} computes {path} on this transformers release")
    number = 3 if path.endswith("video_features") else 1
    check(shape, path, [invokes(shape)[number]])


@pytest.mark.parametrize("path", VALUES)
@pytest.mark.parametrize("shape", ["e2b", "12b"])
def test_a_gradient_in_a_batch_is_the_invoke_s_own(shape, path):
    if not wide(shape).has(path) or not (VIDEO or not path.endswith("video_features")):
        pytest.skip(f"no forward of {shape} computes {path} on this transformers release")
    check(shape, path, invokes(shape))


def test_the_caller_s_own_sound_asks_for_no_gradient():
    """12B's frames are the very tensor of the call; what is served is a copy."""
    one, encoding = wide("12b"), invokes("12b")[1]
    with one.trace(**encoding):
        one.audio.tower_output.save()
        one.logits.sum().backward()
    assert not encoding["input_features"].requires_grad
    assert encoding["input_features"].grad is None
