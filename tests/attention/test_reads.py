"""A read inside the attention moves no bit, and neither does writing back what was read."""

from __future__ import annotations

import nnsight
import pytest
import torch

from tests.attention.values import CALL, CASES, OWN, attention
from tests.core.models import Case


def logits_with(case: Case, touch) -> torch.Tensor:
    """The logits of all invokes, `touch(block's attention)` done in every block of every invoke."""
    model = case.model()
    found = []
    if not case.batched:
        with model.trace(case.prompts[0]):
            for block in range(model.num_layers):
                touch(attention(model, block))
            found.append(model.logits.save())
    else:
        with model.trace() as tracer:
            for row in case.prompts:
                with tracer.invoke(row):
                    for block in range(model.num_layers):
                        touch(attention(model, block))
                    found.append(model.logits.save())
    return torch.cat(found)


def has(host, name: str) -> bool:
    return host.root.has(f"{host.standard_path}.{name}")


@pytest.mark.parametrize(
    ("case", "grad"),
    [
        *((case, grad) for case in CASES for grad in ("enable_grad", "no_grad")),
    ],
    ids=str,
)
def test_each_value_read_alone_in_every_block_moves_no_bit(case, grad):
    wanted = case.logits()
    for name in (*OWN, *CALL):
        with getattr(torch, grad)():
            logits = logits_with(
                case, lambda host, name=name: getattr(host, name) if has(host, name) else None
            )
        assert torch.equal(logits, wanted), name


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("grad", ["enable_grad", "no_grad"])
def test_reading_all_values_of_one_moment_moves_no_bit(case, grad):
    with getattr(torch, grad)():
        logits = logits_with(case, lambda host: [nnsight.save(getattr(host, name)) for name in CALL])
    assert torch.equal(logits, case.logits())


def assigned(host, name: str) -> None:
    setattr(host, name, getattr(host, name))


def cloned(host, name: str) -> None:
    setattr(host, name, getattr(host, name).clone())


def in_place(host, name: str) -> None:
    value = getattr(host, name)
    value[:] = value.clone()


every_style = pytest.mark.parametrize("style", [assigned, cloned, in_place], ids=lambda f: f.__name__)
NOT_MIXED = (*OWN, "attention_queries", "attention_keys", "attention_values", "attention_head_outputs")
MIXED = ("attention_scores", "attention_probabilities")


@pytest.mark.parametrize("case", CASES, ids=str)
@every_style
def test_writing_back_queries_keys_values_and_heads_moves_no_bit(case, style):
    wanted = case.logits()
    for name in NOT_MIXED:
        logits = logits_with(case, lambda host, name=name: style(host, name) if has(host, name) else None)
        assert torch.equal(logits, wanted), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_assigning_the_very_scores_or_pattern_that_was_read_moves_no_bit(case):
    for name in MIXED:
        assert torch.equal(logits_with(case, lambda host, name=name: assigned(host, name)), case.logits()), (
            name
        )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("style", [cloned, in_place], ids=lambda f: f.__name__)
def test_writing_back_a_copy_of_scores_or_pattern_is_a_rounding(case, style):
    """Under a fused kernel the block's mix is computed anew; under eager by the same operations."""
    model, real = case.model(), case.inputs["attention_mask"].bool()
    for name in MIXED:
        for block in (1, model.num_layers - 1):

            def touch(host, name=name, block=block):
                if host.block.index == block:
                    style(host, name)

            logits = logits_with(case, touch)
            if case.attention == "eager":
                assert torch.equal(logits, case.logits()), (name, block)
            elif case.dtype == torch.float32:
                # 2e-6 of its scale at the block itself (below); later blocks make it ten times as much.
                difference = (logits - case.logits())[real].abs().max()
                assert difference <= 3e-5 * case.logits().abs().max(), (name, block)


@pytest.mark.parametrize("case", [case for case in CASES if case.attention == "sdpa"], ids=str)
def test_the_mix_of_an_unchanged_pattern_is_the_kernel_s(case):
    """One block at a time, lest the roundings of one be fed to the next."""
    model = case.model()
    allowed = 2e-6 if case.dtype == torch.float32 else 6 * torch.finfo(case.dtype).eps
    kernels: dict[int, list[torch.Tensor]] = {block: [] for block in range(model.num_layers)}
    logits_with(case, lambda host: kernels[host.block.index].append(host.attention_head_outputs.detach()))
    for name in MIXED:
        for block in range(0, model.num_layers, 3):
            heads: list[torch.Tensor] = []

            def touch(host, block=block, name=name, heads=heads):
                if host.block.index == block:
                    cloned(host, name)
                    heads.append(host.attention_head_outputs.detach())

            logits_with(case, touch)
            for mine, kernel in zip(heads, kernels[block], strict=True):
                assert (mine - kernel).abs().max() <= allowed * kernel.abs().max(), (name, block)
