import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import count_experts


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for tokens, experts, top_k in ((1, 1, 1), (1024, 60, 4), (8192, 128, 8), (64, 512, 10)):
            for dtype in (torch.int32, torch.int64):
                ids, marks = torch.empty(tokens, top_k, dtype=dtype), torch.empty(tokens, dtype=dtype)
                count_experts(ids, marks, torch.empty(experts, dtype=torch.int64))
    assert_resources(kernels)
