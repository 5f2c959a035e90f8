"""The tour: what the library does, shown on a tiny model and checked while it is shown.

Each step prints the code that it runs, then what came out, and leaves checks for the table at the end. The
answers are compared with transformers' own model, unwrapped, and with plain PyTorch hooks on it.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .checks import Check, Pair, agree, check_table, hooked
from .testing import tiny, tiny_module
from .tree import names_tree

__all__ = ["take_tour"]

PROMPT: Final = "The capital of France is"
NEW_TOKENS: Final = 5
MIXTURE: Final = "26b-a4b"


def take_tour(shape: str, console: Console) -> bool:
    """Show what a tiny model of this shape is and does; whether every check on the way held."""
    with torch.no_grad(), _one_thread():
        model, bare = tiny(shape), tiny_module(shape)
        show_names(console, model, shape)
        show_values(console, model)
        checks = [
            *show_sums(console, model, bare),
            *show_lens(console, model),
            *show_edit(console, model, bare),
            *show_routing(console, tiny(MIXTURE), tiny_module(MIXTURE)),
            *show_steering(console, model, bare),
        ]
    held = sum(check.held for check in checks)
    _heading(console, f"What held: {held} of {len(checks)}")
    _indented(console, check_table(checks))
    return held == len(checks)


# -- what is run; `_code` prints the traces of these functions as they stand here ----------------


def read(model: Any, block: int) -> tuple[torch.Tensor, ...]:
    with model.trace(PROMPT):
        embeddings = model.token_embeddings.save()
        middle = model.layers[block].mid_stream.save()
        neurons = model.layers[block].mlp.mlp_neurons.save()
        stream = model.layers[block].layer_output.save()
        logits = model.logits.save()
    return embeddings, middle, neurons, stream, logits


def add_up(model: Any) -> tuple[list[Pair], list[Pair], torch.Tensor]:
    middles, streams = [], []
    with model.trace(PROMPT):
        for layer in model.layers:
            total = layer.layer_input + layer.self_attn.attention_output
            middles.append((total.save(), layer.mid_stream.save()))
            total = total + layer.mlp.mlp_output
            if layer.has_per_layer_input:
                total = total + layer.per_layer_output
            streams.append(((total * layer.layer_scalar).save(), layer.layer_output.save()))
        logits = model.logits.save()
    return middles, streams, logits


def look_through_the_lens(model: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    answers = []
    with model.trace(PROMPT):
        answers.extend(model.project_on_vocab(layer.layer_output).save() for layer in model.layers)
        logits = model.logits.save()
    return answers, logits


def silence_an_mlp(model: Any, block: int) -> torch.Tensor:
    with model.trace(PROMPT):
        model.layers[block].mlp.mlp_output[:] = 0
        logits = model.logits.save()
    return logits


def route(model: Any, block: int) -> tuple[torch.Tensor, ...]:
    with model.trace(PROMPT):
        mlp = model.layers[block].mlp
        shared = mlp.shared_expert_output.save()
        probabilities = mlp.router_probabilities.save()
        outputs = mlp.expert_outputs.save()
        routed = mlp.routed_output.save()
        added = mlp.mlp_output.save()
    return shared, probabilities, outputs, routed, added


def steer(model: Any, block: int, vector: torch.Tensor) -> tuple[torch.Tensor, Any]:
    with model.generate(PROMPT, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS) as tracer:
        report = model.steer(block, vector, factor=32.0)
        tokens = tracer.result.save()
    return tokens, report


# -- the steps: each shows something, and answers with what it checked ---------------------------


def show_names(console: Console, model: Any, shape: str) -> None:
    """The tree of standard names, and what the model says of a name that it lacks."""
    size = f"{model.num_layers} blocks, hidden {model.hidden_size}, random weights"
    _heading(console, f"A tiny {shape}: {size}")
    support = model.support()
    _indented(console, names_tree(support))
    absent = next((row.path.replace("[i]", "[0]") for row in support if not row.available), None)
    if absent is not None:
        _indented(console, Text(f"No model.{absent}: {' '.join(str(model.why_not(absent)).split())}"))


def show_values(console: Console, model: Any) -> None:
    """A trace, and the shapes of what it read."""
    block = model.num_layers // 2
    layer = model.layers[block]
    _heading(console, f"A trace (block = {block})")
    _code(console, read)
    inner = (layer.mid_stream, layer.mlp.mlp_neurons, layer.layer_output)
    names = (model.token_embeddings, *inner, model.logits)
    table = Table("value", "layout", "shape", box=None, header_style="dim", pad_edge=False)
    for name, value in zip(names, read(model, block), strict=True):
        table.add_row(name.path, str(name.layout), " x ".join(map(str, value.shape)))
    _indented(console, table)


def show_sums(console: Console, model: Any, bare: Any) -> list[Check]:
    """Every block's stream is the sum of its named parts, and reading them moves no logit."""
    _heading(console, "Every block adds up")
    _code(console, add_up)
    middles, streams, logits = add_up(model)
    branch = " + per_layer_output" if model.layers[0].has_per_layer_input else ""
    total = f"(layer_input + attention_output + mlp_output{branch}) * layer_scalar"
    unread = [(logits, _logits(bare, model))]
    checks = [
        agree(f"the middle of {len(middles)} blocks", "layer_input + attention_output, mid_stream", middles),
        agree(f"the identity of {len(streams)} blocks", f"{total}, layer_output", streams),
        agree("a read changes nothing", "logits with all that read, those of the bare model", unread),
    ]
    _indented(console, Text(f"Largest difference in {len(streams)} blocks: {checks[1].difference:g}"))
    return checks


def show_lens(console: Console, model: Any) -> list[Check]:
    """The logit lens: what each block's stream would answer."""
    _heading(console, "A logit lens (the weights are random, so the tokens mean nothing)")
    _code(console, look_through_the_lens)
    projected, logits = look_through_the_lens(model)
    table = Table("after block", "likeliest next tokens", box=None, header_style="dim", pad_edge=False)
    for block, answer in enumerate(projected):
        top = model.top_tokens(answer[0, -1], k=4)
        chances = zip(top.tokens, top.probabilities, strict=True)
        words = [f"{_quoted(console, token)} {float(chance):.0%}" for token, chance in chances]
        table.add_row(str(block), "  ".join(f"{word:<12}" for word in words))
    _indented(console, table)
    compares = "project_on_vocab of the last layer_output, logits"
    return [agree("the lens ends at the logits", compares, [(projected[-1], logits)])]


def show_edit(console: Console, model: Any, bare: Any) -> list[Check]:
    """An edit, against the same edit by a PyTorch hook; afterwards the model is as it was."""
    block = model.num_layers // 2
    _heading(console, f"An edit (block = {block})")
    _code(console, silence_an_mlp)
    before, edited = _logits(bare, model), silence_an_mlp(model, block)
    with hooked(bare.model.layers[block].post_feedforward_layernorm, torch.zeros_like):
        by_hand = _logits(bare, model)
    *_, after = read(model, block)
    moved = float((edited - before).abs().max())
    _indented(console, Text(f"The logits move by up to {moved:.3f}."))
    edits, traces = [(edited, by_hand)], [(after, before)]
    return [
        agree(
            "an edit is causal", "logits with the MLP at zero, those of a plain hook", edits, felt=moved > 0
        ),
        agree("an edit ends with its trace", "logits of the next trace, those of the bare model", traces),
    ]


def show_routing(console: Console, model: Any, bare: Any) -> list[Check]:
    """A mixture of experts: the routing, each expert's own output, and how they add up."""
    _heading(console, f"A mixture of experts (tiny {MIXTURE}, each block)")
    _code(console, route)
    routing, sums, outputs = [], [], []
    for block, layer in enumerate(bare.model.layers):
        shared, probabilities, experts, routed, added = route(model, block)
        routing.append((probabilities.sum(-1), torch.ones(probabilities.shape[:-1])))
        sums.append((experts.sum(2), routed))
        both = layer.post_feedforward_layernorm_1(shared) + layer.post_feedforward_layernorm_2(routed)
        outputs.append((layer.post_feedforward_layernorm(both), added))
    mlp = model.layers[0].mlp
    _indented(console, Text(f"Each token goes to {mlp.top_k} of {mlp.num_experts} experts."))
    total = "post(post_1(shared_expert_output) + post_2(routed_output))"
    return [
        agree("a token's routing sums to one", "router_probabilities.sum(experts), 1", routing, 1e-6),
        agree("the experts add up", "expert_outputs.sum(top_k), routed_output", sums, 1e-5),
        agree("the mixture adds up", f"{total}, mlp_output", outputs),
    ]


def show_steering(console: Console, model: Any, bare: Any) -> list[Check]:
    """Steering a generation, its report, and the same by a PyTorch hook."""
    block, encoded = model.num_layers // 2 - 1, _encoded(model)
    vector = bare.lm_head.weight[model.tokenizer.encode("!", add_special_tokens=False)[0]]
    _heading(console, f"A steered generation (block = {block}, vector = the embedding of '!')")
    _code(console, steer)
    tokens, report = steer(model, block, vector)
    options: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    plain = bare.generate(**encoded, **options)
    with hooked(bare.model.layers[block], lambda stream: stream + 32.0 * vector):
        by_hand = bare.generate(**encoded, **options)
    start = encoded["input_ids"].shape[1]
    for name, text in (("plain", plain), ("steered", tokens)):
        written = _quoted(console, model.tokenizer.decode(text[0, start:]))
        _indented(console, Text(f"{name + ':':<9}{written}"))
    _indented(console, Text(str(report)))
    texts, felt = [(tokens, by_hand)], not torch.equal(tokens, plain)
    # The last token is generated and not fed.
    counts = [(torch.tensor(report.positions), torch.tensor(tokens.shape[1] - 1))]
    return [
        agree("steering is causal", "tokens generated, those of a plain hook", texts, felt=felt),
        agree("the report is complete", "positions it counts, tokens that were fed", counts),
    ]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: on a busy machine, threads that wait for each other cost seconds here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _encoded(model: Any) -> Any:
    return model.tokenizer(PROMPT, return_tensors="pt")


def _logits(bare: Any, model: Any) -> torch.Tensor:
    return bare(**_encoded(model)).logits


# -- what is printed -----------------------------------------------------------------------------


def _heading(console: Console, title: str) -> None:
    console.print(Text(f"\n{title}", style="bold"))


def _indented(console: Console, part: Any) -> None:
    console.print(Padding(part, (0, 0, 0, 2)))


def _quoted(console: Console, text: str) -> str:
    """A text in quotes, as far as the terminal can write it."""
    return repr(text).encode(console.encoding, "backslashreplace").decode(console.encoding)


def _code(console: Console, function: Callable) -> None:
    """The trace of a function as it stands in this file."""
    source = textwrap.dedent(inspect.getsource(function).partition("\n")[2])
    source = source[source.index("with ") : source.index("\nreturn")]
    source = source.replace("PROMPT", repr(PROMPT)).replace("NEW_TOKENS", str(NEW_TOKENS))
    _indented(console, Text(source, style="cyan"))
