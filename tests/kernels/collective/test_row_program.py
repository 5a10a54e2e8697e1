import pytest

from tritonllm.kernels.collective.row_program import RowProgram


@pytest.mark.parametrize(
    ("columns", "size", "block", "warps", "registers", "on_processor"),
    [
        (1, 2, 1, 1, 64, 32),
        (1000, 4, 1024, 4, 64, 8),
        (4096, 2, 4096, 16, 64, 2),
        (4096, 8, 4096, 16, 128, 1),  # more ranks, more addresses
        (5120, 2, 8192, 16, 128, 1),
    ],
)
def test_threads_and_registers(columns, size, block, warps, registers, on_processor):
    program = RowProgram(columns, size)
    assert (program.block, program.num_warps) == (block, warps)
    assert (program.registers, program.on_processor) == (registers, on_processor)
