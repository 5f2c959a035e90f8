"""The values of one attention call come in any order; what comes too late says so."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from gemloupe.errors import LateEdit, NeverRan, OutOfOrder
from tests.attention.values import CALL, OWN, attention, of_block
from tests.core.models import Case, ids
from tests.core.places import reading

ORDERS = list(permutations(CALL))
CASES = [
    Case("e2b", batched=True),
    Case("26b-a4b", experts="batched_mm"),
    Case("31b", attention="eager", batched=True),
    Case("12b", dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("start", range(0, len(ORDERS), 120))
def test_every_order_reads_the_same_bits(case, start):
    model, rows = case.model(), case.prompts
    block = model.num_layers - 1
    for order in ORDERS[start : start + 120 : 1 if case.shape == "e2b" else 7]:
        found = []
        with torch.no_grad():
            if case.batched:
                with model.trace() as tracer:
                    for row in rows:
                        with tracer.invoke(row):
                            values = {name: getattr(attention(model, block), name) for name in order}
                            found.append((values, model.logits))
                    found.save()
            else:
                with model.trace(rows[0]):
                    values = {name: getattr(attention(model, block), name) for name in order}
                    found.append((values, model.logits))
                    found.save()
        assert torch.equal(torch.cat([logits for _, logits in found]), case.logits()), order
        for (values, _), wanted in zip(found, reading(case), strict=True):
            for name in CALL:
                assert torch.equal(values[name], of_block(wanted, block)[name]), (order, name)
