import torch
from support.aot import assert_resources, assert_sass, compile_kernels, each_arch

from tritonllm.kernels import batch_invariant_linear


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for m in (1, 64, 128, 256, 4096):
            batch_invariant_linear(torch.empty(m, 4096).bfloat16(), torch.empty(28672, 4096).bfloat16())
            batch_invariant_linear(torch.empty(m, 2048).half(), torch.empty(1024, 2048).half())
        for m in (1, 32, 64, 128, 256):
            gated, out = torch.empty(28672, 4096).bfloat16(), torch.empty(m, 14336).bfloat16()
            batch_invariant_linear(torch.empty(m, 4096).bfloat16(), gated, activation="silu", out=out)
        x, weight, bias = torch.empty(40, 1016), torch.empty(1000, 1016), torch.empty(1000)
        batch_invariant_linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16(), out=torch.empty(40, 1000))
        batch_invariant_linear(x, weight, bias)
    assert_resources(kernels)


def test_hopper_fetches_boxes_and_multiplies_with_wgmma():
    with compile_kernels(90, every=1) as kernels:
        batch_invariant_linear(torch.empty(256, 4096).bfloat16(), torch.empty(28672, 4096).bfloat16())
    assert_sass(kernels, "HGMMA", "_invariant_linear_kernel")
    assert_sass(kernels, "UTMALDG", "_invariant_linear_kernel")
