import pytest
import torch
from support.aot import assert_resources, assert_sass, compile_kernels

from tritonllm.kernels import linear
from tritonllm.kernels.dense.sm90 import few

KERNEL = "linear_few_kernel"
BF16 = torch.bfloat16


def call(m, n, k, kind, dtype=BF16, norm_dtype=BF16):
    """A layer's product of this ``kind``: ``q`` of its norm, ``g`` gated too, ``o`` added to the stream."""
    x, weight = torch.empty(m, k, dtype=dtype), torch.empty(2 * n if kind == "g" else n, k, dtype=dtype)
    if kind == "o":
        return linear(x, weight, residual=torch.empty(m, n, dtype=dtype), constant_weight=True)
    norm = torch.empty(k, dtype=norm_dtype) if dtype == BF16 else None
    fused = {"activation": "silu", "gated": True} if kind == "g" else {}
    return linear(x, weight, norm_weight=norm, **fused, constant_weight=True)


@pytest.mark.parametrize(
    ("n", "k", "kind"), [(4096, 1024, "q"), (3072, 1024, "g"), (8192, 2048, "g"), (2560, 9728, "o")]
)
def test_compiles_for_hopper(n, k, kind):
    """Tensor cores, weights by the widest loads, and no shared memory but for the sums."""
    with compile_kernels(90, every=1) as kernels:
        for m in (5, 16):
            call(m, n, k, kind)
    assert [kernel.name for kernel in kernels] == [KERNEL] * 2
    assert_resources(kernels)
    assert_sass(kernels, "HMMA", KERNEL)
    assert_sass(kernels, "LDG.E.EF.128", KERNEL)
    assert all("LDG.E.EF.64" not in kernel.sass and kernel.shared_bytes <= 4096 for kernel in kernels)


def test_few_compilations_for_all_steps():
    """Up to 8 rows, and up to 16: no other number asks for a new kernel."""
    with compile_kernels(90, every=1) as kernels:
        for m in (3, 4, 5, 7, 8, 9, 11, 16):
            call(m, 1024, 2048, "o")
    assert [kernel.name for kernel in kernels] == [KERNEL] * 8
    assert len({id(kernel.asm) for kernel in kernels}) == 2


def test_other_dtypes_and_odd_sizes_compile():
    with compile_kernels(90, every=1) as kernels:
        call(5, 56, 1008, "q", torch.float16)
        call(5, 9, 16, "q", norm_dtype=torch.float32)
        call(16, 40, 80, "g")
        call(16, 16, few.MAX_K, "o")
    assert [kernel.name for kernel in kernels] == [KERNEL] * 4
    assert_resources(kernels)


def test_weights_come_before_the_kernel_before_has_ended():
    with compile_kernels(90, every=1) as kernels:
        call(5, 1024, 2048, "o")
    ptx = kernels[0].asm["ptx"]
    assert ptx.index("evict_first") < ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait")
