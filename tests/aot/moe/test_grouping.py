import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels.moe.grouping import group_by_expert


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for tokens, experts, top_k in ((1, 1, 1), (16, 128, 8), (1024, 128, 8), (1024, 8, 2), (64, 512, 10)):
            group_by_expert(torch.empty(tokens, top_k, dtype=torch.int32), experts, 64)
        expert_map = torch.empty(128, dtype=torch.int32)
        group_by_expert(torch.empty(1024, 8, dtype=torch.int64), 16, 64, expert_map)
        group_by_expert(torch.empty(1024, 8, dtype=torch.int32), 36, 64, torch.empty(12, 128, dtype=torch.int32))
    assert_resources(kernels)
