import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import moe_route


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for tokens, experts, top_k in ((1, 8, 2), (64, 60, 4), (64, 128, 8), (4096, 128, 8), (64, 512, 10), (1, 1, 1)):
            moe_route(torch.empty(tokens, experts, dtype=torch.bfloat16), top_k)
        options = {"scoring": "sigmoid", "num_groups": 8, "top_k_groups": 4}
        moe_route(torch.empty(64, 256), 8, bias=torch.empty(256), **options)
        moe_route(torch.empty(64, 160), 6, num_groups=8, top_k_groups=3, renormalize=False)
        moe_route(torch.empty(64, 384), 6, scoring="late_sigmoid", bias=torch.empty(384), renormalize=False)
        moe_route(torch.empty(64, 16), 2, scoring="sparsemixer", renormalize=False)
    assert_resources(kernels)
