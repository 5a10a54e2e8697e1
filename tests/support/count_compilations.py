"""Run as a process: how many kernels compile while an engine starts, and how many once it is ready.

`python -m support.count_compilations FOLDER EAGER` writes the two counts as JSON, and how many steps shared a prefix.
"""

import json
import sys

import triton

from support.tiny_models import random_tokens
from tritonllm import LLM, SamplingParams
from tritonllm.engine.step.shared_prefix import CascadePlanner

LENGTHS = (1, 700, 33, 128, 2, 511, 90, 300)
KINDS = ({"temperature": 0}, {"temperature": 0.8}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.1, "seed": 3})


def main(folder: str, eager: bool) -> None:
    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **info: compiled.append(info["repr"])
    plans, plan = [], CascadePlanner.plan
    CascadePlanner.plan = lambda *args: plans.append(plan(*args)) or plans[-1]
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096, "num_blocks": 2048}
    llm = LLM(folder, max_num_seqs=16, max_num_batched_tokens=1024, enforce_eager=eager, **settings)
    at_start = len(compiled)
    prompts = [random_tokens(n, 10000, seed=n) for n in LENGTHS]
    params = [SamplingParams(max_tokens=5 + i, ignore_eos=True, **KINDS[i % 4]) for i in range(len(prompts))]
    llm.generate(prompts, params, use_tqdm=False)  # prompts of many lengths, chunks, mixed steps, every sampling
    llm.generate(prompts[3:4], params[:1], use_tqdm=False)
    shared = random_tokens(3000, 10000, seed=0)  # 16 sequences save 180 MB a layer by reading them once
    for tails in ((1,), (1, 30, 2, 100, 64, 3, 5, 9, 17, 80, 4, 6, 8, 10, 12)):  # cached by the first
        llm.generate([shared + prompts[3][:n] for n in tails], SamplingParams(max_tokens=5), use_tqdm=False)
    counts = {"at_start": at_start, "later": compiled[at_start:], "shared": sum(p is not None for p in plans)}
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "True")
