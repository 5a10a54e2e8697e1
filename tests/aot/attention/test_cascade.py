import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import cascade_decode_attention, plan_cascade
from tritonllm.kernels.attention.cascade import cascade_parts

BF16 = torch.bfloat16


def launch(batch, width, *, heads=32, kv_heads=8, head_size=128, block_size=16, dtype=BF16, **options):
    pool = torch.empty(4, 2, block_size, kv_heads, head_size, dtype=dtype)
    tables, lens = torch.zeros(batch, width, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    plan = plan_cascade(tables, lens, torch.zeros(batch, dtype=torch.bool), width // 2, block_size)
    q = torch.empty(batch, heads, head_size, dtype=dtype)
    cascade_decode_attention(q, pool[:, 0], pool[:, 1], plan, **options)


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        launch(256, 512, softcap=5.0)
        launch(20, 64, heads=14, kv_heads=2, head_size=64, dtype=torch.float16, sinks=torch.empty(14))
    assert_resources(kernels)
    assert "_merge_states_kernel" in {kernel.name for kernel in kernels}


def test_one_compilation_for_all_steps():
    """Batches of one number of parts, and any table widths, do not ask for new kernels."""
    compiled = []
    with compile_kernels(90, every=1) as kernels:
        for batch, width in ((68, 512), (80, 100), (128, 33)):
            assert cascade_parts(batch) == 2
            before = len(kernels)
            launch(batch, width)
            compiled.append({id(kernel.asm) for kernel in kernels[before:]})
    assert compiled[0] == compiled[1] == compiled[2] and compiled[0]
