"""Tiny, seeded, random-weight Gemma 4 models, and the few helpers both fact scripts print with.

Random initialisation leaves norm weights, `layer_scalar`, `router.scale` and `per_expert_scale` at one, which
hides most mistakes about where a value is read: `scramble` moves all of them.
"""

import contextlib
import functools
import logging
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a waiting thread sleeps: CPU time is work, not spinning
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is built here; a peer that asks a hub fails at once

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPES = ("E2B", "26B-A4B", "12B")
WRAPPED = tuple(f"{shape} wrapped" for shape in SHAPES)
PROMPT = "Gemma 4 ok"  # ten bytes, ten tokens
FOLDER = tempfile.TemporaryDirectory()

SLIDING, FULL = "sliding_attention", "full_attention"
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>"]
COMMON = dict(
    vocab_size=320,
    hidden_size=48,
    intermediate_size=64,
    num_attention_heads=4,
    head_dim=8,
    global_head_dim=16,
    sliding_window=6,
    final_logit_softcapping=30.0,
    max_position_embeddings=512,
    initializer_range=0.2,
)
SPECIFIC = {
    "E2B": dict(
        num_hidden_layers=10,
        layer_types=([SLIDING] * 4 + [FULL]) * 2,
        num_key_value_heads=1,
        num_kv_shared_layers=5,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=320,
        use_double_wide_mlp=True,
    ),
    "26B-A4B": dict(
        num_hidden_layers=6,
        layer_types=[SLIDING] * 5 + [FULL],
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=24,
    ),
    "12B": dict(
        num_hidden_layers=6,
        layer_types=[SLIDING] * 5 + [FULL],
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
    ),
}


CLASSES = {
    transformers.Gemma4TextConfig: transformers.Gemma4ForCausalLM,
    transformers.Gemma4UnifiedTextConfig: transformers.Gemma4UnifiedForCausalLM,
    transformers.Gemma4Config: transformers.Gemma4ForConditionalGeneration,
    transformers.Gemma4UnifiedConfig: transformers.Gemma4UnifiedForConditionalGeneration,
}


def text_config(shape, **overrides):
    """The text config of a shape; `overrides` replace its fields."""
    kind = transformers.Gemma4UnifiedTextConfig if shape == "12B" else transformers.Gemma4TextConfig
    return kind(**{**COMMON, **SPECIFIC[shape], **overrides})


def wrapped_config(shape):
    """A config as the published repositories have it: the text stack inside a multimodal wrapper."""
    if shape == "12B":
        vision = dict(mm_embed_dim=48, num_soft_tokens=4)
        return transformers.Gemma4UnifiedConfig(
            text_config=text_config(shape), vision_config=vision, audio_config=None
        )
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    vision |= dict(num_key_value_heads=2, head_dim=8, position_embedding_size=64)
    return transformers.Gemma4Config(text_config=text_config(shape), vision_config=vision, audio_config=None)


def scramble(model, seed):
    """Moves every norm weight, scale and `layer_scalar` off the one that initialisation leaves them at."""
    generator = torch.Generator().manual_seed(seed)
    ends = ("layernorm.weight", "norm.weight", "norm_1.weight", "norm_2.weight", "scale", "layer_scalar")
    values = [*model.named_parameters(), *model.named_buffers()]
    with torch.no_grad():
        for name, value in values:
            if name.endswith(ends) and "embed_scale" not in name:
                value.copy_(0.7 + 0.6 * torch.rand(value.shape, generator=generator))


def build(shape, attention="sdpa", seed=0, **overrides):
    """A seeded model of one of `SHAPES` or `WRAPPED`, in float32 and eval mode."""
    torch.manual_seed(seed)
    if shape in WRAPPED:
        config = wrapped_config(shape.removesuffix(" wrapped"))
    else:
        config = text_config(shape, **overrides)
    model = CLASSES[type(config)]._from_config(config, attn_implementation=attention).eval()
    scramble(model, seed + 1)
    return model


def tokenizer():
    """One token per byte, made in memory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **names)


def save(shape, seed=0):
    """Saves a shape's model and the byte tokenizer; returns the folder, which goes with the process."""
    path = Path(FOLDER.name) / shape.replace(" ", "-")
    build(shape, seed=seed).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def prompt_ids():
    return torch.tensor([tokenizer().encode(PROMPT)])


def layers_of(model):
    """The text blocks of a bare or wrapped model."""
    inner = model.model
    return inner.language_model.layers if hasattr(inner, "language_model") else inner.layers


@contextlib.contextmanager
def hooked(pairs):
    """Registers `(module, forward hook)` pairs for the length of a `with`."""
    handles = [module.register_forward_hook(hook) for module, hook in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def apart(a, b):
    """How far two tensors are: "bit-equal", or the largest absolute difference."""
    if a.shape != b.shape:
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
    if torch.equal(a, b):
        return "bit-equal"
    return f"{(a - b).abs().max().item():.2g} apart"


def say(*parts):
    print("   ", *parts, flush=True)


def attempt(label, action):
    """Prints what `action` returns, or the error it raises, and returns the value or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = action()
    except Exception as error:
        say(f"{label}: raises {type(error).__name__}: {one_line(error)}")
        if os.environ.get("FACTS_DEBUG"):
            traceback.print_exc()
        return None
    say(f"{label}: {value}" if isinstance(value, str) else f"{label}: ok")
    return value


def one_line(error, limit=400):
    """An error's text on one line, without the saved models' folder; of a traceback, the last error alone."""
    text = str(error)
    if "Traceback (most recent call last)" in text:
        errors = re.finditer(r"^[\w.]+(?:Error|Exception)\b", text, re.MULTILINE)
        text = text[[match.start() for match in errors][-1] :]
    text = " ".join(text.split()).replace(FOLDER.name, "<folder>")
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def logged(name, action):
    """What the logger `name` says while `action` runs, one line each."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname}: {one_line(record.getMessage())}")
    logger = logging.getLogger(name)
    usual, logger.handlers = logger.handlers, [handler]
    logging.disable(logging.NOTSET)
    try:
        action()
    finally:
        logger.handlers = usual
        logging.disable(logging.ERROR)
    return lines


def quiet():
    """No progress bars, no notices: the facts are what is printed."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.ERROR)
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    warnings.simplefilter("ignore")


def start_timing():
    """Two threads, as all the figures are taken; says how busy the machine already is."""
    torch.set_num_threads(2)
    say(f"{os.cpu_count()} cores, load average of the last minute {os.getloadavg()[0]:.2f}")


def cpu_seconds():
    """User and system time of this process's threads and of the children it has waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in usage)


def timed(action):
    """Elapsed seconds and CPU seconds of one call: on a busy machine the second is the one to compare."""
    start, before = time.perf_counter(), cpu_seconds()
    action()
    return time.perf_counter() - start, cpu_seconds() - before


def in_turn(actions, rounds):
    """`{name: [(elapsed, cpu), ...]}` of named actions called in turn, after one unmeasured round."""
    taken = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            seconds = timed(action)
            if number:
                taken[name].append(seconds)
    return taken


def import_times(statements, rounds=5):
    """What a fresh interpreter takes to run each statement, in turn: median and range."""
    actions = {
        f"`{statement}`": functools.partial(
            subprocess.run, [sys.executable, "-c", statement], check=True, capture_output=True
        )
        for statement in ("pass", *statements)
    }
    report(in_turn(actions, rounds))


def forward_times(actions, rounds=9):
    """Named actions in turn: median and range, and of the ratio to the first action, round by round."""
    taken = in_turn(actions, rounds)
    report(taken)
    base = next(iter(taken))
    for name in list(taken)[1:]:
        pairs = list(zip(taken[name], taken[base], strict=True))
        elapsed, cpu = ([mine[kind] / its[kind] for mine, its in pairs] for kind in (0, 1))
        say(f"{name} / {base}: elapsed {spread(elapsed)}, CPU {spread(cpu)}")


def report(taken):
    for name, pairs in taken.items():
        elapsed, cpu = zip(*pairs, strict=True)
        say(f"{name}: elapsed {spread(elapsed)} s, CPU {spread(cpu)} s, {len(pairs)} runs")


def spread(values):
    """Median and range, in words."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


LARGE = dict(
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=12,
    layer_types=([SLIDING] * 5 + [FULL]) * 2,
    num_kv_shared_layers=6,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=64,
    global_head_dim=128,
    sliding_window=128,
    hidden_size_per_layer_input=64,
    vocab_size=8192,
    vocab_size_per_layer_input=8192,
    initializer_range=0.02,
)


def large(attention):
    """The model that forwards are timed on: E2B-like, hidden 512, 12 blocks, random weights."""
    return build("E2B", attention, **LARGE)


def large_batch():
    """4 prompts of 256 tokens."""
    return torch.randint(4, 8192, (4, 256), generator=torch.Generator().manual_seed(3))
