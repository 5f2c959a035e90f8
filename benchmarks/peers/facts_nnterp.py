"""What nnterp does on Gemma 4: each question answered by running it on tiny random-weight models.

python facts_nnterp.py          every question
python facts_nnterp.py 3 6      questions 3 and 6
"""

import sys

import tiny  # first: it sets what torch and transformers read from the environment

# isort: split
import nnsight
import torch
from nnterp import StandardizedTransformer
from nnterp.interventions import logit_lens

apart, attempt, say = tiny.apart, tiny.attempt, tiny.say
IDS = tiny.prompt_ids()
PROMPT = {"input_ids": IDS}


def wrap(shape, attention="sdpa", **options):
    """nnterp around a loaded module."""
    return StandardizedTransformer(tiny.build(shape, attention), tokenizer=tiny.tokenizer(), **options)


def bare_logits(model):
    with torch.no_grad():
        return model(IDS).logits


def logits_of(model):
    with torch.no_grad(), model.trace(PROMPT):
        logits = model.logits.save()
    return logits


def question_1():
    """Does it load, and are its logits those of bare transformers?"""
    for shape in tiny.SHAPES + tiny.WRAPPED:
        attempt(
            f"{shape}, loaded module (sdpa)",
            lambda shape=shape: compare(wrap(shape), {a: tiny.build(shape, a) for a in ("sdpa", "eager")}),
        )
        attempt(
            f"{shape}, directory",
            lambda shape=shape: compare(StandardizedTransformer(tiny.save(shape)), loaded(shape)),
        )
        attempt(
            f"{shape}, directory, enable_attention_probs=True",
            lambda shape=shape: compare(
                StandardizedTransformer(tiny.save(shape), enable_attention_probs=True), loaded(shape)
            ),
        )

    module = tiny.build("E2B")
    before = type(module.model.layers[0]).__name__
    wrapped = StandardizedTransformer(module, tokenizer=tiny.tokenizer())
    after = type(module.model.layers[0]).__name__
    say(f"the user's module: blocks {before}, then {after}; it is what runs: {wrapped._model is module}")
    for shape in tiny.SHAPES:
        notices = tiny.logged("nnterp", lambda shape=shape: wrap(shape))
        say(f"{shape}: logged while loading: {notices}")


def loaded(shape):
    path, kind = tiny.save(shape), type(tiny.build(shape))
    return {a: kind.from_pretrained(path, attn_implementation=a) for a in ("sdpa", "eager")}


def compare(model, bare):
    logits = logits_of(model)
    distances = {attention: apart(logits, bare_logits(module)) for attention, module in bare.items()}
    return (
        f"{type(model._model).__name__} runs {model._model.config._attn_implementation}; logits against bare "
        f"sdpa {distances['sdpa']}, eager {distances['eager']}"
    )


def question_2():
    """Which named value reaches the stream?"""
    for shape in tiny.SHAPES:
        model = wrap(shape)
        worst = {}
        for i, block in enumerate(tiny.layers_of(tiny.build(shape))):
            scalar, extra = block.layer_scalar, 0
            with torch.no_grad(), model.trace(PROMPT):
                before = model.layers_input[i].clone().save()
                attention = model.attentions_output[i].clone().save()
                attention_normed = model.layers[i].post_attention_layernorm.output.clone().save()
                mlp = model.mlps_output[i].clone().save()
                mlp_normed = model.layers[i].post_feedforward_layernorm.output.clone().save()
                if shape == "E2B":
                    extra = model.layers[i].post_per_layer_input_norm.output.clone().save()
                after = model.layers_output[i].clone().save()
            gap(
                worst,
                "(layers_input + attentions_output + mlps_output) * layer_scalar == layers_output",
                (before + attention + mlp) * scalar,
                after,
            )
            gap(
                worst,
                "the same with the per-layer branch's post-norm added",
                (before + attention + mlp + extra) * scalar,
                after,
            )
            gap(
                worst,
                "the same with the three post-norms' outputs, reached by transformers' own names",
                (before + attention_normed + mlp_normed + extra) * scalar,
                after,
            )
        for name, distance in worst.items():
            say(f"{shape}: {name}: {f'{distance:.2g} apart in the worst block' if distance else 'bit-equal'}")


def gap(worst, name, a, b):
    worst[name] = max(worst.get(name, 0.0), (a - b).abs().max().item())


def question_3():
    """The attention pattern."""
    model = wrap("E2B")

    def read(model, block=0):
        with torch.no_grad(), model.trace(PROMPT):
            pattern = model.attention_probabilities[block].save()
        sums = torch.allclose(pattern.sum(-1), torch.ones(1, 4, 10))
        return f"{tuple(pattern.shape)}, rows sum to one: {sums}"

    attempt("loaded module under sdpa: attention_probabilities[0]", lambda: read(model))
    attempt(
        "loaded module under sdpa, enable_attention_probs=True",
        lambda: wrap("E2B", enable_attention_probs=True),
    )
    path = tiny.save("E2B")
    eager = attempt(
        "directory, enable_attention_probs=True",
        lambda: StandardizedTransformer(path, enable_attention_probs=True),
    )
    say(f"it runs {eager._model.config._attn_implementation}")
    for block in range(10):
        attempt(f"attention_probabilities[{block}]", lambda block=block: read(eager, block))
    clean = logits_of(eager)
    for block in (0, 9):
        with torch.no_grad(), eager.trace(PROMPT):
            eager.attention_probabilities[block] = torch.zeros_like(eager.attention_probabilities[block])
            edited = eager.logits.save()
        say(f"edit of attention_probabilities[{block}]: logits {apart(clean, edited)}")
    say(f"public names with 'score': {[name for name in dir(StandardizedTransformer) if 'score' in name]}")


def question_4():
    """Rotated queries and keys, borrowed keys and values."""
    model = wrap("E2B")
    words = ("quer", "key", "value", "kv")
    named = [name for name in own_names() if any(word in name for word in words)]
    say(f"public names about queries, keys or values: {named}")

    def call_inputs(block):
        with torch.no_grad(), model.trace(PROMPT):
            inputs = model.layers[block].self_attn.source.attention_interface_0.inputs
            shapes = [tuple(value.shape) for value in inputs[0][1:4]].save()
        return f"queries, keys, values {shapes}"

    for block in (3, 5):
        attempt(
            f"nnsight's layers[{block}].self_attn.source.attention_interface_0.inputs",
            lambda block=block: call_inputs(block),
        )
    with torch.no_grad(), model.trace(PROMPT):
        held = model.layers_output[4].clone().save()
        clean = model.attentions_output[5].clone().save()

    def in_place():
        with torch.no_grad(), model.trace(PROMPT):
            keys = model.layers[3].self_attn.source.attention_interface_0.inputs[0][2]
            keys[:] = keys.flip(2)
            model.layers_output[4] = held
            out = model.attentions_output[5].clone().save()
        return f"block 5's attentions_output {apart(clean, out)}"

    def replaced():
        with torch.no_grad(), model.trace(PROMPT):
            args, kwargs = model.layers[3].self_attn.source.attention_interface_0.inputs
            model.layers[3].self_attn.source.attention_interface_0.inputs = (
                (*args[:2], args[2].flip(2), *args[3:]),
                kwargs,
            )
            source = model.attentions_output[3].clone().save()
            model.layers_output[4] = held
            out = model.attentions_output[5].clone().save()
        with torch.no_grad(), model.trace(PROMPT):
            before = model.attentions_output[3].clone().save()
        return f"block 3's attentions_output {apart(before, source)}, block 5's {apart(clean, out)}"

    attempt("block 3's keys edited in place there, the stream entering block 5 held clean", in_place)
    attempt("block 3's keys replaced there, the stream entering block 5 held clean", replaced)


def own_names():
    """The public names nnterp adds to nnsight's model."""
    inherited = dir(nnsight.LanguageModel(tiny.build("12B"), tokenizer=tiny.tokenizer()))
    mine = {*vars(wrap("12B")), *dir(StandardizedTransformer)}
    return sorted(name for name in mine.difference(inherited) if not name.startswith("_"))


def question_5():
    """A ten-token prompt in generate, two new tokens: the positions each block's output has."""
    model = wrap("E2B")
    with torch.no_grad(), model.generate(PROMPT, max_new_tokens=2, do_sample=False) as tracer:
        rows = nnsight.save([])
        for _step in tracer.iter[:2]:
            for i in range(10):
                rows.append((i, model.layers_output[i].shape[1]))
    by_block = {i: [n for j, n in rows if j == i] for i in range(10)}
    say("rows per call: " + ", ".join(f"{i}: {r}" for i, r in by_block.items()))
    with (
        torch.no_grad(),
        model.generate(PROMPT, max_new_tokens=2, do_sample=False, output_router_logits=True) as tracer,
    ):
        rows = nnsight.save([])
        for _step in tracer.iter[:2]:
            for i in range(10):
                rows.append((i, model.layers_output[i].shape[1]))
    by_block = {i: [n for j, n in rows if j == i] for i in range(10)}
    say("with output_router_logits=True: " + ", ".join(f"{i}: {r}" for i, r in by_block.items()))


def question_6():
    """The mixture's routing."""
    model = wrap("26B-A4B")
    words = ("rout", "expert", "moe")
    say(f"public names about routing: {[n for n in own_names() if any(word in n for word in words)]}")
    truth = routing(0)
    with torch.no_grad(), model.trace(PROMPT):
        dense = model.mlps_output[0].clone().save()
        logits = model.layers[0].router.proj.output.clone().save()
        router = model.layers[0].router.output
        probabilities, weights, indices = (
            router[0].clone().save(),
            router[1].clone().save(),
            router[2].clone().save(),
        )
        routed = model.layers[0].experts.output.clone().save()
    say(
        f"mlps_output[0] {tuple(dense.shape)}: against the dense MLP alone {apart(dense, truth['dense'])}, "
        f"against what the block adds {apart(dense, truth['added'])}"
    )
    say(f"by transformers' own names: router.proj.output: logits {apart(logits, truth['logits'])}")
    say(f"  router.output[0]: against those logits {apart(probabilities, truth['logits'])}")
    say(f"  router.output[0]: against their softmax {apart(probabilities, truth['probabilities'])}")
    say(f"  router.output[1]: weights {apart(weights, truth['weights'])}")
    say(f"  router.output[2]: indices {apart(indices, truth['indices'])}")
    say(f"  experts.output: the sum over experts {apart(routed, truth['routed'])}")
    clean = logits_of(model)
    for position, name in enumerate(("probabilities", "weights", "indices")):
        with torch.no_grad(), model.trace(PROMPT):
            parts = list(model.layers[0].router.output)
            parts[position] = parts[position].flip(0)
            model.layers[0].router.output = tuple(parts)
            edited = model.logits.save()
        say(f"edit of router.output[{position}] ({name}): logits {apart(clean, edited)}")


def routing(block):
    """A block's routing in bare transformers."""
    model, seen = tiny.build("26B-A4B"), {}
    host = model.model.layers[block]
    with tiny.hooked(
        [
            (host.mlp, lambda module, args, out: seen.update(dense=out)),
            (host.post_feedforward_layernorm, lambda module, args, out: seen.update(added=out)),
            (host.router.proj, lambda module, args, out: seen.update(logits=out)),
            (
                host.router,
                lambda module, args, out: seen.update(probabilities=out[0], weights=out[1], indices=out[2]),
            ),
            (host.experts, lambda module, args, out: seen.update(routed=out)),
        ]
    ):
        bare_logits(model)
    return seen


def question_7():
    """Per-layer embeddings."""
    model = wrap("E2B")
    say(f"public names about per-layer embeddings: {[n for n in own_names() if 'per_layer' in n]}")
    say(f"public names nnterp adds: {' '.join(own_names())}")

    def by_transformers_names():
        with torch.no_grad(), model.trace(PROMPT):
            table = model.model.embed_tokens_per_layer.output.clone().save()
            received = model.layers[0].inputs[0][1].clone().save()
        shapes = tuple(table.shape), tuple(received.shape)
        return "embed_tokens_per_layer.output {}, layers[0].inputs[0][1] {}".format(*shapes)

    attempt("by transformers' own names", by_transformers_names)


def question_8():
    """What happens on asking for what the checkpoint lacks?"""
    model, mixture = wrap("E2B"), wrap("26B-A4B")

    def in_trace(read, model=model):
        with torch.no_grad(), model.trace(PROMPT):
            value = read().save()
        return str(value)

    attempt("E2B layers[5].self_attn.k_proj", lambda: model.layers[5].self_attn.k_proj)
    attempt(
        "E2B layers[5].self_attn.k_proj.output in a trace",
        lambda: in_trace(lambda: model.layers[5].self_attn.k_proj.output),
    )
    attempt("E2B layers[0].router.output in a trace", lambda: in_trace(lambda: model.layers[0].router.output))
    attempt("26B-A4B layers[5].self_attn.v_proj", lambda: repr(mixture.layers[5].self_attn.v_proj))
    attempt(
        "26B-A4B layers[5].self_attn.v_proj.output in a trace",
        lambda: in_trace(lambda: mixture.layers[5].self_attn.v_proj.output, mixture),
    )
    attempt("26B-A4B layers[0].per_layer_projection", lambda: mixture.layers[0].per_layer_projection)
    for shape in tiny.SHAPES:
        attempt(
            f"{shape} layers_output[0] after a trace of the ten-token prompt",
            lambda shape=shape: outside(shape),
        )

    def out_of_order():
        with torch.no_grad(), model.trace(PROMPT):
            late = model.layers_output[1].save()
            early = model.layers_output[0].save()
        return str((late.shape, early.shape))

    attempt("E2B layers_output[1], then layers_output[0]", out_of_order)


def outside(shape):
    """Block 0's output as read after a trace has ended, in words."""
    model, seen = wrap(shape), []
    logits_of(model)
    value = model.layers_output[0]
    bare = tiny.build(shape)
    with tiny.hooked([(bare.model.layers[0], lambda module, args, out: seen.append(out.clone()))]):
        bare_logits(bare)
    text = f"a {type(value).__name__} of shape {tuple(value.shape)}"
    if type(value) is not torch.Tensor:
        return text
    return f"{text}, against the block's output for that prompt {apart(value, seen[0])}"


def question_9():
    """The logit lens."""
    model = wrap("E2B")
    bare = tiny.build("E2B")
    clean = bare_logits(bare)
    with torch.no_grad(), model.trace(PROMPT):
        last = model.layers_output[9].clone().save()
        projected = model.project_on_vocab(last).save()
    say(
        f"project_on_vocab(layers_output[9]) against the logits: {apart(projected, clean)}; "
        f"against norm and head without the cap: {apart(projected, raw(bare, last))}"
    )
    probabilities = logit_lens(model, tiny.PROMPT)
    expected = clean[:, -1].softmax(-1)
    say(
        f"logit_lens {tuple(probabilities.shape)}: its last entry against softmax of the logits: "
        f"{apart(probabilities[:, -1], expected)}; against softmax of norm and head without the cap: "
        f"{apart(probabilities[:, -1], raw(bare, last)[:, -1].softmax(-1))}"
    )
    with torch.no_grad(), model.trace(PROMPT):
        probs = model.next_token_probs.save()
    say(f"next_token_probs against softmax of the logits: {apart(probs, expected)}")


def raw(model, hidden):
    """The final norm and the head, without the cap."""
    with torch.no_grad():
        return model.lm_head(model.model.norm(hidden))


def question_10():
    """Import time, and one forward with every block's output kept."""
    tiny.start_timing()
    tiny.import_times(
        [
            "import torch",
            "import transformers",
            "import torch, transformers.models.gemma4.modeling_gemma4",
            "import nnsight",
            "import nnterp",
        ]
    )
    batch = tiny.large_batch()
    bare_model = tiny.large("sdpa")
    model = StandardizedTransformer(tiny.large("sdpa"), tokenizer=tiny.tokenizer())

    def bare():
        kept = {}
        pairs = [
            (layer, lambda module, args, out, i=i: kept.__setitem__(i, out))
            for i, layer in enumerate(bare_model.model.layers)
        ]
        with torch.no_grad(), tiny.hooked(pairs):
            return bare_model(batch, use_cache=False).logits, kept

    def traced():
        with torch.no_grad(), model.trace({"input_ids": batch}, use_cache=False):
            kept = nnsight.save([])
            for i in range(12):
                kept.append(model.layers_output[i])
            logits = model.logits.save()
        return logits, kept

    logits, kept = bare()
    answer, outputs = traced()
    say(f"logits {apart(logits, answer)}, last block's output {apart(kept[11], outputs[11])}")
    tiny.forward_times({"bare hooks, sdpa": bare, "trace reading all layers_output": traced})


if __name__ == "__main__":
    tiny.quiet()
    for number in sys.argv[1:] or range(1, 11):
        question = globals()[f"question_{number}"]
        print(f"{number}. {question.__doc__.splitlines()[0]}", flush=True)
        question()
