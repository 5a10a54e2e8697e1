"""The steps before the first request load every kernel that steps of other sizes launch."""

import dataclasses
from itertools import product

import pytest
import torch
from support.mechanism_configs import MECHANISMS
from support.real_configs import LLAMA_3_1_8B, QWEN3_0_6B

from tritonllm.config import EngineConfig
from tritonllm.engine.precompile import META, NUM_BLOCKS, Target, kernels_of, list_kernels, pretend, target_of
from tritonllm.engine.runner import ModelRunner
from tritonllm.engine.warm_up import WarmUp
from tritonllm.kernels.compile.parallel import Specialization
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config

MODELS = {"qwen3-0.6b": QWEN3_0_6B, "llama-3.1-8b": LLAMA_3_1_8B, **MECHANISMS}
LENGTH = 2304


def described(kernel: Specialization) -> str:
    source = kernel.source
    return str((kernel.name, *(sorted(map(str, d.items())) for d in (source.signature, source.constants)), source.attrs,
                kernel.options))  # fmt: skip


@pytest.mark.parametrize(("seats", "gpu"), [(16, "NVIDIA H200"), (256, "NVIDIA H200"), (256, None)])
@pytest.mark.parametrize("model", list(MODELS))
def test_sizes_between_launch_the_same_kernels(model, seats, gpu):
    """Prompts, decodes and rows of logits of sizes that the warm-up leaves out, with tables of any width."""
    spec = spec_from_config(MODELS[model])
    spec = dataclasses.replace(spec, layers=tuple(spec.layers[place] for place in spec.distinct_layers()))
    config = EngineConfig.from_kwargs(
        model="m", max_num_seqs=seats, max_num_batched_tokens=32 * seats, max_model_len=LENGTH
    )
    with pretend(target_of(90)), list_kernels(gpu) as found, torch.inference_mode():
        decoder = Decoder(spec, dtype=torch.bfloat16, device=META, max_model_len=LENGTH)
        runner = ModelRunner(decoder, config, META, LENGTH)
        runner.start(NUM_BLOCKS, LENGTH)
        with decoder.rehearsal():
            steps = runner.warm_up()
            steps.run()
            loaded = {described(kernel) for kernel in found}
            assert len(loaded) > 10
            found.clear()
            kinds = [{}, {"prompt_token": True}, {"shared": True}]
            for sequences, width, kind in product((1, 2, 3, 7, seats - 1), (1, 3, 45, 100), kinds):
                if "shared" not in kind or runner._may_share(sequences):
                    steps.decode_step(sequences, width, **kind)
            beyond = [(1 << bit) + 1 for bit in range(1, 13)]  # powers of two, which the warm-up has
            sizes = (*beyond, 100, 300, 600, 1023, 1500, 20 * seats, 32 * seats - 1)
            for tokens, width in product((n for n in sizes if n <= 32 * seats), (1, 100)):
                steps.prefill_step(tokens, width)
            for rows in range(1, seats + 1):
                runner.sample_hidden(torch.empty(rows, spec.hidden_size, dtype=torch.bfloat16, device=META))
    assert {described(kernel) for kernel in found} <= loaded


@pytest.mark.parametrize("longest", [64, 4096, 40960])
def test_no_step_comes_twice(monkeypatch, longest):
    steps = []
    for name in ("prefill_step", "decode_step"):
        note = lambda self, *args, name=name, **options: steps.append((name, *args, *options.items()))  # noqa: E731
        monkeypatch.setattr(WarmUp, name, note)
    sizes = {"block_size": 16, "max_model_len": longest, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    WarmUp(None, None, device=META, **sizes, padded=[8448], may_share=lambda sequences: True).run()
    assert len(steps) == len(set(steps)) > 50


@pytest.mark.parametrize("seats", [16, 256])
def test_precompiled_are_the_kernels_of_all_layers(seats):
    """Not only those of a model that is as small as its kinds of layers: what one layer leaves, the next one takes."""
    spec = spec_from_config(QWEN3_0_6B)
    config = EngineConfig.from_kwargs(model="m", max_num_seqs=seats, max_num_batched_tokens=512, max_model_len=LENGTH)
    target = Target(arch=90, name="NVIDIA H200", dtype=torch.bfloat16, max_model_len=LENGTH)
    precompiled = {described(kernel) for kernel in kernels_of(spec, config, target)}
    spec = dataclasses.replace(spec, layers=spec.layers[:4])
    with pretend(target_of(90)), list_kernels("NVIDIA H200") as found, torch.inference_mode():
        runner = ModelRunner(
            Decoder(spec, dtype=torch.bfloat16, device=META, max_model_len=LENGTH), config, META, LENGTH
        )
        runner.start(NUM_BLOCKS, LENGTH)
        runner.warm_up().run()
    assert {described(kernel) for kernel in found} == precompiled
