"""The jobs of `benchmarks/compared.py` in TransformerLens, which always runs eager attention."""

import subprocess
from pathlib import Path

import torch
from serving import serve

STEPS = 8


def load(folder):
    """The bridge around transformers' module, the module, and the prompt."""
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    subprocess.check_call = refuse_installs
    transformers.logging.set_verbosity_error()
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    bridge = TransformerBridge.boot_transformers(folder, hf_model=module, device="cpu")
    return bridge, module, torch.load(Path(folder) / "prompt.pt")


def refuse_installs(command, **_):
    """TransformerLens may run pip while it loads a model; a measurement installs nothing."""
    raise subprocess.CalledProcessError(1, command)


def middle(bridge):
    return bridge.cfg.n_layers // 2


def every(bridge, name):
    return [f"blocks.{index}.{name}" for index in range(bridge.cfg.n_layers)]


def cached(bridge, prompt, names):
    """Without a key-value cache, which spares TransformerLens some work."""
    _, cache = bridge.run_with_cache(prompt, names_filter=names, use_cache=False)
    return [cache[name] for name in names]


def edit(bridge, prompt):
    vector = torch.linspace(-1, 1, bridge.cfg.d_model)
    hook = (f"blocks.{middle(bridge)}.hook_out", lambda value, hook: value + vector)
    return [bridge.run_with_hooks(prompt, fwd_hooks=[hook])]


def generate(bridge, prompt):
    kept = []

    def keep(value, hook):
        kept.append(value)

    with bridge.hooks(fwd_hooks=[(name, keep) for name in every(bridge, "hook_out")]):
        bridge.generate(prompt, max_new_tokens=STEPS, do_sample=False, stop_at_eos=False, verbose=False)
    return kept


JOBS = {
    "outside": lambda bridge, prompt: [bridge(prompt)],
    "one": lambda bridge, prompt: cached(bridge, prompt, [f"blocks.{middle(bridge)}.hook_out"]),
    "outputs": lambda bridge, prompt: cached(bridge, prompt, every(bridge, "hook_out")),
    "patterns": lambda bridge, prompt: cached(bridge, prompt, every(bridge, "attn.hook_pattern")),
    "edit": edit,
    "generate": generate,
}

if __name__ == "__main__":
    serve(load, JOBS, ("transformer-lens", "torch", "transformers"))
