import re

import pytest
import torch
from support.aot import assert_resources, compile_kernels, each_arch, is_nvidia
from support.inboxes import local_memories

from tritonllm.kernels.collective import AddedNorm, combine_rows, dispatch_rows, exchange_layout

REGISTERS, THREADS, PROCESSORS = 65536, 2048, 132
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def call(columns, size, dtype, top_k=8):
    """Both ways, back in all forms; returns the layout."""
    layout = exchange_layout(columns, dtype, size, top_k, 2, PROCESSORS)
    memory, *_ = local_memories(layout._replace(programs=2), torch.device("cpu"))
    x, residual = torch.empty(2, 2, columns, dtype=dtype).unbind()
    ids, marks = torch.zeros(2, top_k, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    dispatch_rows(x, torch.empty(2, top_k), ids, marks, memory, 4, 2)
    combine_rows(memory, ids, marks, 4, 2)
    combine_rows(memory, ids, marks, 4, 2, residual=residual)
    combine_rows(memory, ids, marks, 4, 2, added=AddedNorm(residual, torch.empty(columns, dtype=dtype)))
    return layout


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch, every=1 if isinstance(arch, int) else None) as kernels:
        for columns, size, dtype, top_k in ((2048, 4, BF16, 8), (100, 3, FP32, 3)):
            call(columns, size, dtype, top_k)
    assert_resources(kernels)


@pytest.mark.parametrize(
    ("columns", "size", "dtype"),
    [
        (2048, 2, BF16),
        (16384, 4, BF16),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(2880, 8, BF16), (4096, 4, FP16), (7168, 8, BF16), (8192, 2, FP32)]
        ),
    ],
)
def test_all_programs_fit_on_the_gpu_at_once(columns, size, dtype):
    """They wait for those of other ranks. And each access to a row takes 16 bytes."""
    with compile_kernels(90, every=1) as kernels:
        layout = call(columns, size, dtype)
    assert_resources(kernels)
    for kernel in kernels:
        threads = 32 * kernel.num_warps * layout.programs
        registers, _ = kernel.resource_usage()
        assert threads <= THREADS * PROCESSORS
        assert threads * -(-registers // 8) * 8 <= REGISTERS * PROCESSORS
        assert "LDG.E.128" in kernel.sass
        assert "STG.E.128" in kernel.sass


def places(kernel, pattern):
    """Numbers of the lines of PTX in which it is."""
    return [place for place, line in enumerate(kernel.asm["ptx"].splitlines()) if re.search(pattern, line)]


@each_arch(is_nvidia)
def test_flags_show_to_all_ranks_what_was_written_before(arch):
    """All threads meet, then one releases to the whole system; one acquires of it, then all meet."""
    with compile_kernels(arch, every=1) as kernels:
        call(2048, 4, BF16)
    assert {kernel.name for kernel in kernels} == {"_dispatch_kernel", "_combine_kernel"}
    for kernel in kernels:
        (released,) = places(kernel, r"atom\.global\.(sys\.release|release\.sys)\.exch")
        (acquired,) = places(kernel, r"atom\.global\.(sys\.acquire|acquire\.sys)\.add")
        assert places(kernel, r"\b(atom|red)\.") == [released, acquired]
        barriers, rows = places(kernel, r"\bbar\.sync"), places(kernel, r"(ld\.global\.cg|st\.global)\.v4\.b32")
        if kernel.name == "_dispatch_kernel":
            last = max(place for place in places(kernel, r"st\.global") if place < released)
            assert rows and max(rows) <= last
            assert any(last < place < released for place in barriers)
        else:
            first = min(places(kernel, r"ld\.global\.cg"))
            assert first in rows and any(acquired < place < first for place in barriers)
