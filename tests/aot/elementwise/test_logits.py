import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import cap_logits


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for rows, vocab in ((4, 256000), (4, 50257), (1, 100)):
            cap_logits(torch.empty(rows, vocab), softcap=30.0)
            cap_logits(torch.empty(rows, vocab), scale=0.0625)
    assert_resources(kernels)
