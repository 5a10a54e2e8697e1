import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import pack_blocks, unpack_blocks


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for dtype, elements in ((torch.bfloat16, 16 * 8 * 128), (torch.float8_e4m3fn, 16 * 3 * 72)):
            pool, packed = torch.empty(4, 7, elements, dtype=dtype), torch.empty(3, 4, elements, dtype=dtype)
            blocks = torch.empty(3, dtype=torch.int64)
            pack_blocks(pool, blocks, packed)
            unpack_blocks(packed, blocks, pool)
            slots = torch.empty(9, 4, elements, dtype=dtype)
            pack_blocks(pool, blocks, slots, places=blocks)
            unpack_blocks(slots, blocks, pool, places=blocks)
    assert_resources(kernels)
