import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import token_logprobs


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        token_logprobs(torch.empty(64, 151936), torch.empty(64, dtype=torch.int64), 20)
        token_logprobs(torch.empty(3, 128256, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int64), 0)
        token_logprobs(torch.empty(1, 50257, dtype=torch.float16), torch.empty(1, dtype=torch.int64), 5)
    assert_resources(kernels)


def test_smallest_sizes_compile():
    """Sizes of 1 become constants in Triton."""
    with compile_kernels(90, every=1) as kernels:
        token_logprobs(torch.empty(1, 1), torch.empty(1, dtype=torch.int64), 1)
        token_logprobs(torch.empty(1, 200), torch.empty(1, dtype=torch.int64), 200)
    assert_resources(kernels)
