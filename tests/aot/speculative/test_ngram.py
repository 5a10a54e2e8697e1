import pytest
import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import propose_ngrams


@pytest.mark.parametrize("past", [None, torch.empty(65536, dtype=torch.int32)], ids=["own", "past"])
@each_arch()
def test_compiles_once_for_all_lengths(arch, past):
    with compile_kernels(arch) as kernels:
        for rows, length in ((1, 100), (7, 131072), (256, 40960)):
            seats, ends, counts = (torch.empty(rows, dtype=torch.int32) for _ in range(3))
            ids, drafts = (torch.empty(rows, n, dtype=torch.int32) for n in (5, 4))
            history = torch.empty(256, length, dtype=torch.int32)
            propose_ngrams(history, seats, ends, counts, ids, drafts, shortest=2, longest=5, past=past, factor=1.5)
    assert_resources(kernels)
    assert len({kernel.asm["llir"] for kernel in kernels}) == 1
