import pytest
import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import apply_activation, gelu_and_mul, silu_and_mul


@each_arch()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compiles(arch, dtype):
    with compile_kernels(arch) as kernels:
        for n in (14336, 3072, 100):
            silu_and_mul(torch.empty(2, 2 * n, dtype=dtype))
        gelu_and_mul(torch.empty(2, 512, dtype=dtype))
        gelu_and_mul(torch.empty(2, 512, dtype=dtype), approximate="tanh")
        x = torch.empty(2, 3072, dtype=dtype)
        for activation in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
            apply_activation(x, activation, out=x)
    assert_resources(kernels)


@pytest.mark.parametrize(("arch", "tokens", "waits"), [(90, 2, True), (90, 5000, False), (80, 2, False)])
def test_few_programs_wait_for_the_kernel_before(arch, tokens, waits):
    """Dependent launch: where the chip has it, unless starting so many programs would take longer than it saves."""
    with compile_kernels(arch) as kernels:
        silu_and_mul(torch.empty(tokens, 64, dtype=torch.bfloat16))
    assert all(("griddepcontrol.wait" in kernel.asm["ptx"]) == waits for kernel in kernels)
