import pytest
import torch
from support.aot import ARCHS, assert_resources, compile_kernels

from tritonllm.kernels import cap_logits


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for rows, vocab in ((4, 256000), (4, 50257), (1, 100)):
            cap_logits(torch.empty(rows, vocab), softcap=30.0)
            cap_logits(torch.empty(rows, vocab), scale=0.0625)
    assert_resources(kernels)
