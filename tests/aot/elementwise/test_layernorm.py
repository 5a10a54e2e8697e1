import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import fused_add_layer_norm, layer_norm


def call(rows, n, dtype=torch.bfloat16):
    x, residual = torch.empty(2, rows, n, dtype=dtype).unbind()
    weight, bias = torch.empty(2, n, dtype=dtype).unbind()
    layer_norm(x, weight, bias)
    fused_add_layer_norm(x, residual, weight, bias)


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for rows, n in ((1, 768), (512, 4096), (512, 8192), (512, 16384), (512, 20000), (2048, 8192), (3, 100)):
            call(rows, n)
        call(512, 4096, torch.float16)
        call(512, 16384, torch.float32)
        layer_norm(torch.empty(512, 2048), None)
        q = torch.empty(512, 112 * 128, dtype=torch.bfloat16)[:, : 96 * 128].view(512, 96, 128)
        weight, bias = torch.empty(2, 96, 128, dtype=torch.bfloat16).unbind()
        layer_norm(q, weight, out=q)
        layer_norm(q, weight, bias, out=q)
    assert_resources(kernels)
