import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import fused_add_rms_norm, rms_norm


def call(rows, n, dtype=torch.bfloat16):
    x, residual, weight = torch.empty(rows, n, dtype=dtype), torch.empty(rows, n, dtype=dtype), torch.empty(n)
    rms_norm(x, weight)
    fused_add_rms_norm(x, residual, weight, weight_offset=1.0, x_scale=0.22)


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for rows, n in (
            (1, 4096),
            (512, 4096),
            (512, 8192),
            (1, 16384),
            (512, 16384),
            (512, 20000),
            (2048, 8192),
            (3, 100),
            (1, 1),
        ):
            call(rows, n)
        call(512, 4096, torch.float16)
        call(512, 16384, torch.float32)
        q = torch.empty(512, 4096, dtype=torch.bfloat16)[:, :2048].view(512, 16, 128)
        rms_norm(q, torch.empty(128, dtype=torch.bfloat16), out=q)
        rms_norm(q, torch.empty(16, 128, dtype=torch.bfloat16), out=q)
    assert_resources(kernels)
