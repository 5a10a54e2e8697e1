import pytest
import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import merge_attention_states

BF16 = torch.bfloat16


def launch(parts, tokens, heads, head_size, dtype, **options):
    states = torch.empty(parts + 1, tokens, heads, head_size, dtype=dtype)
    lses = torch.empty(parts + 1, tokens, heads)
    merge_attention_states(states[:-1], lses[:-1], states[-1], lses[-1], **options)


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for parts in (1, 2, 4, 8, 16):
            launch(parts, 256, 32, 128, BF16, use_a=torch.empty(256, dtype=torch.bool))
        launch(2, 256, 71, 64, torch.float16, return_lse=True)
        launch(16, 8, 8, 512, torch.float32, return_lse=True)
        launch(16, 8, 12, 80, BF16)
    assert_resources(kernels)


@pytest.mark.parametrize("parts", [1, 2, 16])
def test_wide_loads(parts):
    """Eight bfloat16 numbers at a time; a load of one each would take as many instructions."""
    with compile_kernels(90, every=1) as kernels:
        launch(parts, 256, 32, 128, BF16, use_a=torch.empty(256, dtype=torch.bool))
    (kernel,) = kernels
    assert kernel.sass.count("LDG.E.128") == parts + 1
    assert kernel.sass.count("STG.E.128") == 1


def test_one_compilation_for_all_steps():
    with compile_kernels(90, every=1) as kernels:
        for tokens in (1, 3, 16, 256):
            launch(2, tokens, 32, 128, BF16, use_a=torch.empty(tokens + 1, dtype=torch.bool)[1:])
    assert len(kernels) == 4 and len({id(kernel.asm) for kernel in kernels}) == 1
