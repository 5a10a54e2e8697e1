"""What a step of examples/nano.py launches compiles for Hopper, a handful of kernels a layer."""

from collections import Counter

import pytest
import torch
from support.aot import compile_kernels

from examples import nano
from tritonllm.demo import model_path

LAYERS = 6
EACH_LAYER = {"_norm_kernel": 2, "_qk_norm_rope_store_kernel": 1}


@pytest.mark.parametrize(("prompt", "attention"), [(1, "few_kernel"), (40, "_prefill_kernel")])
def test_kernels_of_a_step(prompt, attention):
    with compile_kernels(90, every=1) as compiled:
        engine = nano.Engine(model_path(), torch.bfloat16, "cpu", num_blocks=64, max_seqs=4, max_len=256)
        for _ in range(2):
            engine.scheduler.add(nano.Request([5] * prompt))
        engine.compute(engine.batch(engine.scheduler.schedule()), prompt)
    names = Counter(kernel.name for kernel in compiled)
    expected = {name: LAYERS * count for name, count in EACH_LAYER.items()} | {attention: LAYERS, "_draw_kernel": 1}
    expected["_norm_kernel"] += 1
    assert expected.items() <= names.items()
    assert all(kernel.arch == 90 for kernel in compiled)
