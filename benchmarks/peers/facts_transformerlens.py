"""What TransformerLens does on Gemma 4: each question answered by running it on tiny random-weight models.

python facts_transformerlens.py          every question
python facts_transformerlens.py 3 6      questions 3 and 6
"""

import os
import subprocess
import sys
import warnings

os.environ["PIP_NO_INDEX"] = "1"  # question 1 shows a package installation at load: it must not happen

import tiny  # first: it sets what torch and transformers read from the environment

# isort: split
import torch
import transformers
from transformer_lens import TransformerBridge
from transformer_lens.tools.analysis import logit_lens

apart, attempt, say = tiny.apart, tiny.attempt, tiny.say
IDS = tiny.prompt_ids()
INSTALLS = []


def refuse_installs(command, **_):
    """Stands in for `subprocess.check_call` while a model loads: records the command and fails."""
    INSTALLS.append(" ".join(["python", *command[1:]]))
    raise subprocess.CalledProcessError(1, command)


def boot(shape, attention="sdpa"):
    """A bridge around a loaded module; the tokenizer comes from a directory (question 1 says why)."""
    path = tiny.save("E2B")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = tiny.build(shape, attention)
    return TransformerBridge.boot_transformers(path, hf_model=model, tokenizer=tokenizer, device="cpu")


def boot_folder(shape):
    return TransformerBridge.boot_transformers(tiny.save(shape), device="cpu")


def bare_logits(model):
    with torch.no_grad():
        return model(IDS).logits


def logits_with(bridge, *hooks):
    """The bridge's logits with `(name, function)` hooks, and the warnings that came with them."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        logits = bridge.run_with_hooks(IDS, fwd_hooks=list(hooks))
    return logits, sorted({tiny.one_line(w.message) for w in caught if issubclass(w.category, UserWarning)})


def cached(bridge, *names):
    with torch.no_grad():
        _, cache = bridge.run_with_cache(IDS, names_filter=list(names) or None)
    return cache


def edit(bridge, name, function):
    """Prints how often a hook on `name` fires, how far its return moves the logits, and what is warned of."""
    fired = []
    clean, _ = logits_with(bridge)

    def hook(value, hook):
        fired.append(tuple(value.shape))
        return function(value)

    moved, warned = logits_with(bridge, (name, hook))
    say(f"edit of {name}: fires {len(fired)} times, shape {fired[:1]}, logits {apart(clean, moved)}")
    for text in warned:
        say(f"  warns: {text}")


def question_1():
    """Does it load, and are its logits those of bare transformers?"""
    memory = tiny.tokenizer()
    attempt(
        "E2B, loaded module, tokenizer made in memory",
        lambda: TransformerBridge.boot_transformers(
            tiny.save("E2B"), hf_model=tiny.build("E2B"), tokenizer=memory, device="cpu"
        ),
    )
    original = subprocess.check_call
    subprocess.check_call = refuse_installs
    try:
        for shape in tiny.SHAPES + tiny.WRAPPED:
            attempt(
                f"{shape}, loaded module (sdpa)",
                lambda shape=shape: compare(shape, boot(shape), fresh(shape)),
            )
            attempt(
                f"{shape}, directory", lambda shape=shape: compare(shape, boot_folder(shape), loaded(shape))
            )
    finally:
        subprocess.check_call = original
    say(f"commands it tried to run while loading: {sorted(set(INSTALLS))}, {len(INSTALLS)} times")
    model = tiny.build("E2B")
    before, switched = type(model.model.layers[0]).__name__, model.config._attn_implementation
    TransformerBridge.boot_transformers(tiny.save("E2B"), hf_model=model, device="cpu")
    say(
        f"the user's module, before: {before}, {switched}; after: {type(model.model.layers[0]).__name__}, "
        f"{model.config._attn_implementation}"
    )


def fresh(shape):
    return {attention: bare_logits(tiny.build(shape, attention)) for attention in ("sdpa", "eager")}


def loaded(shape):
    """Bare transformers' logits from the same directory."""
    path, kind = tiny.save(shape), type(tiny.build(shape))
    both = {a: kind.from_pretrained(path, attn_implementation=a) for a in ("sdpa", "eager")}
    return {attention: bare_logits(model) for attention, model in both.items()}


def compare(shape, bridge, bare):
    with torch.no_grad():
        logits = bridge(IDS)
    runs = bridge.original_model.config._attn_implementation
    distances = [f"{attention} {apart(logits, other)}" for attention, other in bare.items()]
    return f"runs {runs}; logits against bare {', '.join(distances)}"


def question_2():
    """Which named value reaches the stream?"""
    for shape in tiny.SHAPES[:2]:
        bridge = boot(shape)
        cache = cached(bridge)
        worst = {}
        for i, block in enumerate(tiny.layers_of(tiny.build(shape))):
            at = f"blocks.{i}"
            scalar = block.layer_scalar
            before, after = cache[f"{at}.hook_resid_pre"], cache[f"{at}.hook_resid_post"]
            total = before + cache[f"{at}.hook_attn_out"]
            gap(worst, "resid_pre + attn_out == resid_mid", total, cache[f"{at}.hook_resid_mid"])
            total = total + cache[f"{at}.hook_mlp_out"]
            gap(worst, "resid_pre + attn_out + mlp_out == resid_post", total, after)
            gap(worst, "(resid_pre + attn_out + mlp_out) * layer_scalar == resid_post", total * scalar, after)
            if f"{at}.post_per_layer_input_norm.hook_out" in cache:
                total = total + cache[f"{at}.post_per_layer_input_norm.hook_out"]
                name = "(resid_pre + attn_out + mlp_out + post_per_layer_input_norm.hook_out) * layer_scalar"
                gap(worst, f"{name} == resid_post", total * scalar, after)
            gap(
                worst,
                "attn.hook_out == hook_attn_out",
                cache[f"{at}.attn.hook_out"],
                cache[f"{at}.hook_attn_out"],
            )
            gap(
                worst,
                "mlp.hook_out == hook_mlp_out",
                cache[f"{at}.mlp.hook_out"],
                cache[f"{at}.hook_mlp_out"],
            )
        for name, distance in worst.items():
            say(f"{shape}: {name}: {f'{distance:.2g} apart in the worst block' if distance else 'bit-equal'}")
        say(f"{shape}: hook names with 'scalar': {[n for n in cache if 'scalar' in n]}")
        attempt(
            f"{shape}: cache.decompose_resid() summed, against the last hook_resid_post",
            lambda c=cache: apart(
                c.decompose_resid(mode="full").sum(0), c[f"blocks.{len(c.model.blocks) - 1}.hook_resid_post"]
            ),
        )


def gap(worst, name, a, b):
    worst[name] = max(worst.get(name, 0.0), (a - b).abs().max().item())


def question_3():
    """The attention pattern."""
    bridge = boot("E2B", "sdpa")
    cache = cached(bridge)
    pattern, scores = cache["blocks.4.attn.hook_pattern"], cache["blocks.4.attn.hook_attn_scores"]
    say(
        f"loaded with sdpa, now runs {bridge.original_model.config._attn_implementation}; hook_pattern "
        f"{tuple(pattern.shape)}, rows sum to one: {torch.allclose(pattern.sum(-1), torch.ones(1, 4, 10))}"
    )
    served = [i for i in range(10) if f"blocks.{i}.attn.hook_pattern" in cache]
    say(f"blocks with hook_pattern in the cache: {served}")
    say(f"hook_attn_scores against hook_pattern: {apart(scores, pattern)}")
    edit(bridge, "blocks.0.attn.hook_pattern", torch.zeros_like)
    edit(bridge, "blocks.0.attn.hook_attn_scores", torch.zeros_like)
    edit(bridge, "blocks.0.attn.hook_z", torch.zeros_like)
    bridge.original_model.set_attn_implementation("sdpa")
    say(f"set back to sdpa: hook_pattern in the cache: {'blocks.0.attn.hook_pattern' in cached(bridge)}")
    edit(bridge, "blocks.0.attn.hook_pattern", torch.zeros_like)


def question_4():
    """Rotated queries and keys, borrowed keys and values."""
    bridge = boot("E2B")
    cache = cached(bridge)
    mine = sorted(bridge.hook_dict)
    say(f"hook points of block 3 (a source): {short(mine, 3)}")
    say(f"hook points of block 5 (a borrower of block 3): {short(mine, 5)}")
    say(f"in the cache, block 3: {short(cache, 3)}")
    say(f"in the cache, block 5: {short(cache, 5)}")
    queries, keys = true_queries_and_keys(3)
    k_norm = cache["blocks.3.attn.k_norm.hook_out"].transpose(1, 2)
    say(f"k_norm.hook_out against the keys attended with: {apart(k_norm, keys)}")
    say(f"  at position 0, where the rotation does nothing: {apart(k_norm[:, :, 0], keys[:, :, 0])}")
    q_norm = cache["blocks.3.attn.q_norm.hook_out"].transpose(1, 2)
    say(f"q_norm.hook_out against the queries attended with: {apart(q_norm, queries)}")
    edit(bridge, "blocks.3.attn.hook_rot_k", torch.zeros_like)
    edit(bridge, "blocks.3.attn.hook_k", lambda value: value.flip(1))
    edit(bridge, "blocks.3.attn.k_norm.hook_out", lambda value: value.flip(1))
    held = cache["blocks.4.hook_resid_post"].clone()
    outs = {}

    def keep(name):
        return (f"blocks.{name}.hook_attn_out", lambda value, hook: outs.__setitem__(name, value.clone()))

    logits_with(
        bridge,
        ("blocks.3.attn.hook_k", lambda value, hook: value.flip(1)),
        ("blocks.4.hook_resid_post", lambda value, hook: held),
        keep(3),
        keep(5),
    )
    say(
        f"block 3's keys edited, the stream entering block 5 held clean: block 5's hook_attn_out "
        f"{apart(outs[5], cache['blocks.5.hook_attn_out'])}"
    )


def short(names, block):
    start = f"blocks.{block}.attn."
    return " ".join(sorted(name.removeprefix(start) for name in names if name.startswith(start)))


def true_queries_and_keys(block):
    """The queries and keys a block of bare transformers hands to its attention function."""
    model, seen = tiny.build("E2B"), []
    registry = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    sdpa = registry["sdpa"]

    def recording(module, query, key, *rest, **named):
        if module.layer_idx == block:
            seen.append((query.clone(), key.clone()))
        return sdpa(module, query, key, *rest, **named)

    registry.register("recording", recording)
    transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(
        "recording", transformers.masking_utils.sdpa_mask
    )
    model.set_attn_implementation("recording")
    bare_logits(model)
    return seen[0]


def question_5():
    """A ten-token prompt in generate, two new tokens: the positions each block's output has."""
    bridge = boot("E2B")
    rows = {}
    hooks = [
        (f"blocks.{i}.hook_out", lambda value, hook: rows.setdefault(hook.name, []).append(value.shape[1]))
        for i in range(10)
    ]
    for name, call in {
        "generate": lambda: bridge.generate(IDS, max_new_tokens=2, do_sample=False, verbose=False),
        "hf_generate": lambda: bridge.hf_generate(IDS, max_new_tokens=2, do_sample=False),
    }.items():
        rows.clear()

        def run(call=call):
            with torch.no_grad(), bridge.hooks(fwd_hooks=hooks):
                return f"tokens {call()[0, 10:].tolist()}"

        attempt(name, run)
        say(f"{name}: rows per call: " + ", ".join(f"{n.split('.')[1]}: {r}" for n, r in rows.items()))
    bare = tiny.build("E2B", "eager")
    say(f"bare generate: tokens {bare.generate(IDS, max_new_tokens=2, do_sample=False)[0, 10:].tolist()}")


def question_6():
    """The mixture's routing."""
    bridge = boot("26B-A4B")
    cache = cached(bridge)
    inside = sorted(name for name in bridge.hook_dict if name.startswith("blocks.0."))
    say("hook points: " + " ".join(name for name in inside if "router" in name or "expert" in name))
    truth = routing(0)
    value = cache["blocks.0.router.hook_out"]
    say(f"router.hook_out {tuple(value.shape)}: against router.proj's logits {apart(value, truth['logits'])}")
    say(f"  against their softmax {apart(value, truth['probabilities'])}")
    edit(bridge, "blocks.0.router.hook_out", lambda value: value.flip(-1))
    edit(bridge, "blocks.0.router.hook_in", lambda value: value.flip(0))
    value = cache["blocks.0.experts.hook_out"]
    say(
        f"experts.hook_out {tuple(value.shape)}: against the sum over experts {apart(value, truth['routed'])}"
    )
    edit(bridge, "blocks.0.experts.hook_out", torch.zeros_like)
    shapes = [truth[name].shape for name in ("weights", "indices")]
    found = [name for name, value in cache.items() if name.startswith("blocks.0.") and value.shape in shapes]
    say(f"cached values of the shape of the top-k weights or indices {[tuple(s) for s in shapes]}: {found}")


def routing(block):
    """A block's routing in bare transformers."""
    model, seen = tiny.build("26B-A4B", "eager"), {}
    host = model.model.layers[block]
    with tiny.hooked(
        [
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
    bridge = boot("E2B")
    cache = cached(bridge)
    outside = sorted(name for name in bridge.hook_dict if not name.startswith("blocks."))
    inside = sorted(name for name in bridge.hook_dict if name.startswith("blocks.0.") and "per_layer" in name)
    say("names outside the blocks: " + " ".join(outside))
    say("names in block 0 with 'per_layer': " + " ".join(inside))
    inputs = []
    model = tiny.build("E2B", "eager")
    with tiny.hooked([(model.model.layers[0], lambda module, args, out: inputs.append(args[1]))]):
        bare_logits(model)
    equal = [n for n, v in cache.items() if v.shape == inputs[0].shape and torch.allclose(v, inputs[0])]
    say(f"cached values equal to the per-layer input of block 0: {equal}")


def question_8():
    """What happens on asking for what the checkpoint lacks?"""
    bridge, mixture = boot("E2B"), boot("26B-A4B")

    def use(*_args, **_named):
        return None

    missing = "blocks.5.attn.hook_k"
    attempt(f"E2B cache[{missing!r}]", lambda: cached(bridge)[missing])
    attempt(
        f"E2B run_with_cache(names_filter=[{missing!r}])",
        lambda: f"cache holds {list(cached(bridge, missing))}",
    )
    attempt(
        f"E2B run_with_hooks on {missing}", lambda: bridge.run_with_hooks(IDS, fwd_hooks=[(missing, use)])
    )
    attempt("E2B blocks[5].attn.k", lambda: bridge.blocks[5].attn.k)
    attempt("E2B blocks[0].router", lambda: bridge.blocks[0].router)
    attempt("E2B hasattr(blocks[0], 'router')", lambda: str(hasattr(bridge.blocks[0], "router")))
    name = "blocks.0.per_layer_projection.hook_out"
    attempt(f"26B-A4B run_with_hooks on {name}", lambda: mixture.run_with_hooks(IDS, fwd_hooks=[(name, use)]))
    name = "blocks.5.attn.hook_v"
    attempt(f"26B-A4B run_with_hooks on {name}", lambda: mixture.run_with_hooks(IDS, fwd_hooks=[(name, use)]))
    name = "blocks.0.attn.hook_rot_q"
    attempt(
        f"E2B run_with_cache(names_filter=[{name!r}])", lambda: f"cache holds {list(cached(bridge, name))}"
    )


def question_9():
    """The logit lens."""
    bridge = boot("E2B")
    model = tiny.build("E2B", "eager")
    cache = cached(bridge)
    with torch.no_grad():
        logits = bridge(IDS)

        def raw(hidden):
            return model.lm_head(model.model.norm(hidden))

        result = logit_lens(bridge, IDS, positions=None)
        say(f"tools.analysis.logit_lens: {result.labels}, {tuple(result.values.shape)}")
        say(f"its last entry against the model's logits: {apart(result.values[-1], logits)}")
        middle = cache["blocks.3.hook_resid_post"]
        entry = result.values[result.labels.index("4_pre")]
        say(
            f"its entry 4_pre against norm, head and cap: {apart(entry, 30 * torch.tanh(raw(middle) / 30))}; "
            f"against norm and head alone: {apart(entry, raw(middle))}"
        )
        last = cache["blocks.9.hook_resid_post"]
        by_hand = bridge.unembed(bridge.ln_final(last))
        say(f"bridge.unembed(bridge.ln_final(last)) against the logits: {apart(by_hand, logits)}")
        stack = cache.accumulated_resid(layer=-1, incl_mid=False, apply_ln=True)
        by_hand = stack[-1] @ bridge.W_U
        say(f"accumulated_resid(apply_ln=True)[-1] @ W_U against the logits: {apart(by_hand, logits)}")


def question_10():
    """Import time, and one forward with every block's output kept."""
    tiny.start_timing()
    tiny.import_times(
        [
            "import torch",
            "import transformers",
            "import torch, transformers.models.gemma4.modeling_gemma4",
            "import transformer_lens",
            "from transformer_lens import TransformerBridge",
        ]
    )
    batch = tiny.large_batch()
    eager, sdpa, wrapped = tiny.large("eager"), tiny.large("sdpa"), tiny.large("eager")
    path = tiny.save("E2B")
    bridge = TransformerBridge.boot_transformers(path, hf_model=wrapped, device="cpu")
    names = [f"blocks.{i}.hook_out" for i in range(12)]

    def bare(model):
        kept = {}
        pairs = [
            (layer, lambda module, args, out, i=i: kept.__setitem__(i, out))
            for i, layer in enumerate(model.model.layers)
        ]
        with torch.no_grad(), tiny.hooked(pairs):
            return model(batch, use_cache=False).logits, kept

    def cache_of(filter):
        with torch.no_grad():
            return bridge.run_with_cache(batch, names_filter=filter, use_cache=False)

    logits, kept = bare(eager)
    answer, cache = cache_of(names)
    say(
        f"logits {apart(logits, answer)}, last block's output {apart(kept[11], cache[names[-1]])}, "
        f"cache holds {len(cache)} values"
    )
    tiny.forward_times(
        {
            "bare hooks, eager": lambda: bare(eager),
            "bare hooks, sdpa": lambda: bare(sdpa),
            "run_with_cache, block outputs": lambda: cache_of(names),
        }
    )
    tiny.forward_times(
        {"bare hooks, eager": lambda: bare(eager), "run_with_cache, all": lambda: cache_of(None)}, 7
    )


if __name__ == "__main__":
    tiny.quiet()
    for number in sys.argv[1:] or range(1, 11):
        question = globals()[f"question_{number}"]
        print(f"{number}. {question.__doc__.splitlines()[0]}", flush=True)
        question()
