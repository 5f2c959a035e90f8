"""Where the model adds in place to what was served, a block of code that still holds it sees it as it was."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from gemloupe.testing import tiny, tiny_sound

GIVEN: Final[dict[str, Any]] = {"audio": [tiny_sound()]}
PROMPT: Final = "Hear: <|audio|> What?"
PARTS: Final = (
    "feed_forward1.mlp_output",
    "self_attn.attention_output",
    "lconv1d.convolution_output",
    "feed_forward2.mlp_output",
)

each_part = pytest.mark.parametrize("part", PARTS)


def of(block: Any, part: str) -> tuple[Any, str]:
    place, _, name = part.rpartition(".")
    return getattr(block, place), name


@each_part
def test_what_is_held_under_gradients_stays_as_it_was(part: str):
    model = tiny("e2b", wrapper=True)
    path = f"audio.layers[0].{part}"
    expected = model.collect(PROMPT, [path, "logits"], **GIVEN)
    with model.trace(PROMPT, **GIVEN):
        host, name = of(model.audio.layers[0], part)
        value = getattr(host, name).save()
        after = model.audio.layers[0].layer_output.detach().save()
        logits = model.logits
        with logits[0, -1, 40].backward():
            gradient = value.grad.save()
        logits = logits.detach().save()
    assert torch.equal(value.detach(), expected[path])
    assert torch.equal(logits, expected["logits"])
    assert after.isfinite().all()
    assert gradient.abs().sum() > 0


@each_part
@pytest.mark.parametrize("grad", [False, True])
def test_what_was_edited_stays_as_it_was_written(part: str, grad: bool):
    model = tiny("e2b", wrapper=True)
    with torch.set_grad_enabled(grad), model.trace(PROMPT, **GIVEN):
        host, name = of(model.audio.layers[0], part)
        value = getattr(host, name)
        value[:] = 0
        in_place = model.logits.detach().save()
        held = value.abs().max().detach().save()
    with torch.set_grad_enabled(grad), model.trace(PROMPT, **GIVEN):
        host, name = of(model.audio.layers[0], part)
        zeros: Any = torch.zeros_like(getattr(host, name))
        setattr(host, name, zeros)
        assigned = model.logits.detach().save()
        given = zeros.abs().max().detach().save()
    assert held == given == 0
    assert torch.equal(in_place, assigned)
    assert not torch.equal(in_place, model.collect(PROMPT, "logits", **GIVEN)["logits"])
