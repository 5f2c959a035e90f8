"""What a peer's process does, in an environment of its own: runs one job a request, and says what it took.

`python serve_PEER.py FOLDER THREADS` reads the model, its tokenizer and `prompt.pt` from the folder. It
answers one line of JSON for each line it is sent:

    (the start)     {"weights": 48146688, "versions": "nnterp 1.3.0, ..."}
    time JOB        [wall, cpu]     of one run of the job, in seconds
    peak JOB        bytes           the most that torch's allocator held at once during one run, above before
    keep JOB PATH   true            one run, whose tensors are written to the path

It knows nothing of gemloupe, which cannot be installed beside the peer.
"""

import gc
import importlib.metadata
import json
import os
import sys
import time
from itertools import accumulate

import torch


def timed(run):
    """Elapsed and computing seconds of one run, as benchmarks/measure.py takes them."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    taken = time.perf_counter() - wall, time.process_time() - cpu
    del result
    return taken


def peak(run):
    """The most bytes held at once, as benchmarks/memory.py takes them."""
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run()
    events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events))


def serve(load, jobs, packages):
    """Answer until the input ends. `load` makes the model, its module and the prompt; `jobs` are functions
    of the model and the prompt, by name."""
    folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value):
        print(json.dumps(value), file=answers, flush=True)

    model, module, prompt = load(folder)
    weights = sum(weight.numel() for weight in module.parameters())
    gc.collect()
    gc.freeze()
    found = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    answer({"weights": weights, "versions": found})
    for line in sys.stdin:
        request, job, *path = line.strip().split(" ", 2)

        def run(job=job):
            with torch.no_grad():
                return jobs[job](model, prompt)

        if request == "keep":
            torch.save(run(), path[0])
            answer(True)
        else:
            answer({"time": timed, "peak": peak}[request](run))
