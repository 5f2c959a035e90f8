"""TransformerLens in an environment of its own: runs one `run_with_cache` a request, and says what it took.

`python serve_transformerlens.py FOLDER THREADS` reads the model, its tokenizer and `prompt.pt` from the
folder. It answers one line of JSON for each line it is sent:

    (the start)     {"weights": 48146688, "versions": "TransformerLens 4.3.0, ..."}
    time            [wall, cpu]     of one call, in seconds
    keep PATH       true            one call, whose tensors are written to the path

It knows nothing of gemloupe, which cannot be installed beside it.
"""

import gc
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch


def load(folder):
    """The bridge around transformers' module, the prompt, and how many weights the module has."""
    import transformers
    from transformer_lens.model_bridge import TransformerBridge

    subprocess.check_call = refuse_installs
    transformers.logging.set_verbosity_error()
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    weights = sum(weight.numel() for weight in module.parameters())
    bridge = TransformerBridge.boot_transformers(folder, hf_model=module, device="cpu")
    return bridge, torch.load(Path(folder) / "prompt.pt"), weights


def refuse_installs(command, **_):
    """TransformerLens may run pip while it loads a model; a measurement installs nothing."""
    raise subprocess.CalledProcessError(1, command)


def call(bridge, prompt, names):
    """Every block's output. Without a key-value cache, which spares TransformerLens some work."""
    with torch.no_grad():
        _, cache = bridge.run_with_cache(prompt, names_filter=names, use_cache=False)
    return [cache[name] for name in names]


def timed(action):
    """Elapsed and computing seconds of one call, as benchmarks/measure.py takes them."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    result = action()
    taken = time.perf_counter() - wall, time.process_time() - cpu
    del result
    return taken


def main(folder, threads):
    torch.set_num_threads(int(threads))
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value):
        print(json.dumps(value), file=answers, flush=True)

    bridge, prompt, weights = load(folder)
    names = [f"blocks.{index}.hook_out" for index in range(bridge.cfg.n_layers)]
    gc.collect()
    gc.freeze()
    packages = ("transformer-lens", "torch", "transformers")
    found = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    answer({"weights": weights, "versions": found})
    for line in sys.stdin:
        request, _, path = line.strip().partition(" ")
        if request == "keep":
            torch.save(call(bridge, prompt, names), path)
            answer(True)
        else:
            answer(timed(lambda: call(bridge, prompt, names)))


if __name__ == "__main__":
    main(*sys.argv[1:])
