"""The jobs of `benchmarks/compared.py` in nnterp, which has patterns of a model that it made eager alone."""

from functools import cached_property
from pathlib import Path

import nnsight
import torch
import transformers
from nnterp import StandardizedTransformer
from serving import serve

STEPS = 8


class Models:
    """nnterp under sdpa, and for patterns a model of its own that is loaded as it asks for."""

    def __init__(self, folder):
        self.folder = folder
        self.sdpa = StandardizedTransformer(folder, dispatch=True, device_map="cpu", dtype=torch.float32)

    @cached_property
    def eager(self):
        return StandardizedTransformer(
            self.folder, enable_attention_probs=True, dispatch=True, device_map="cpu", dtype=torch.float32
        )


def load(folder):
    transformers.logging.set_verbosity_error()
    models = Models(folder)
    ids = torch.load(Path(folder) / "prompt.pt")
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert models.sdpa._model.config._attn_implementation == "sdpa"
    return models, models.sdpa._model, inputs


def outside(models, prompt):
    return [models.sdpa._model(**prompt).logits]


def one(models, prompt):
    model = models.sdpa
    with model.trace(prompt):
        kept = model.layers_output[model.num_layers // 2].save()
    return [kept]


def outputs(models, prompt):
    model = models.sdpa
    with model.trace(prompt):
        kept = nnsight.save([model.layers_output[index] for index in range(model.num_layers)])
    return kept


def patterns(models, prompt):
    model = models.eager
    with model.trace(prompt):
        kept = nnsight.save([model.attention_probabilities[index] for index in range(model.num_layers)])
    return kept


def edit(models, prompt):
    model = models.sdpa
    at = model.num_layers // 2
    vector = torch.linspace(-1, 1, model.hidden_size)
    with model.trace(prompt):
        model.layers_output[at] = model.layers_output[at] + vector
        logits = model.logits.save()
    return [logits]


def generate(models, prompt):
    model = models.sdpa
    length = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False}
    with model.generate(prompt, **length) as tracer:
        kept = nnsight.save([])
        for _step in tracer.iter[:STEPS]:
            for index in range(model.num_layers):
                kept.append(model.layers_output[index])
    return kept


JOBS = {each.__name__: each for each in (outside, one, outputs, patterns, edit, generate)}

if __name__ == "__main__":
    serve(load, JOBS, ("nnterp", "nnsight", "torch", "transformers"))
