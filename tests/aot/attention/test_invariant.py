import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import batch_invariant_attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def launch(heads, kv_heads, head_size, dtype, **options):
    pool = torch.empty(4, 2, 16, kv_heads, head_size, dtype=dtype)
    tables, lens = torch.empty(8, 512, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    q, cu = torch.empty(64, heads, head_size, dtype=dtype), torch.empty(9, dtype=torch.int32)
    batch_invariant_attention(q, pool[:, 0], pool[:, 1], tables, cu, lens, **options)


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        launch(32, 8, 128, BF16)
        launch(14, 2, 64, FP16, window=100)
        launch(8, 4, 256, BF16, softcap=50.0)
        launch(8, 2, 512, BF16)
        launch(16, 8, 128, FP32)
        launch(32, 8, 80, BF16, sinks=torch.empty(32), alibi_slopes=torch.empty(32), return_lse=True)
        for heads, head_size, tokens in ((32, 128, 1), (32, 128, 5), (8, 64, 1), (16, 256, 1)):
            for keys in (512, 8192):  # never shared out, and shared out
                launch(heads, 8, head_size, BF16, max_seqlen_q=tokens, max_seqlen_k=keys)
    assert_resources(kernels)


def test_the_loops_of_decodes_spill_nothing():
    with compile_kernels(90) as kernels:
        for head_size in (64, 128):
            launch(32, 8, head_size, BF16, max_seqlen_q=1, max_seqlen_k=512)
            launch(32, 8, head_size, BF16, max_seqlen_q=1, max_seqlen_k=8192)
    for kernel in kernels:
        assert kernel.resource_usage()[1] == 0, kernel.name
