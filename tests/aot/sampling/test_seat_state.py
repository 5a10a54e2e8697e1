import pytest
import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.kernels import advance_seats
from tritonllm.kernels.sampling.seats import Decodes, SeatState, StepRows, Verdict

DTYPES = {"top_k": torch.int32, "seeds": torch.int64, "steps": torch.int64}


def zeros(count, *dtypes):
    return [torch.zeros(count, dtype=dtype) for dtype in dtypes]


def rows_of(count):
    return SamplingRows(*zeros(count, *(DTYPES.get(name, torch.float32) for name in SamplingRows._fields)))


@pytest.mark.parametrize("seats", [1, 256, 2048])
@each_arch()
def test_compiles_once_for_all_sizes_of_steps(arch, seats):
    state, parameters = SeatState(*zeros(seats, *[torch.int32] * 3)), rows_of(seats)
    with compile_kernels(arch) as kernels:
        for rows, decodes, width in ((1, 1, 1), (3, 0, 7), (seats, seats, 64)):
            rows = min(rows, seats)
            step = StepRows(*zeros(rows, torch.int32, torch.int32, torch.int64))
            of_decodes = zeros(decodes, torch.int32, torch.int64, torch.int64, torch.int32)
            batch = Decodes(*of_decodes, torch.zeros(decodes, width, dtype=torch.int32))
            drawn = torch.zeros(seats, dtype=torch.int64)
            advance_seats(state, parameters, step, rows_of(rows), batch, drawn, block_tokens=16)
    assert_resources(kernels)
    assert len({kernel.asm["llir"] for kernel in kernels}) == 1


@pytest.mark.parametrize("each", [1, 5])
def test_compiles_with_drafts_and_limits(each):
    state, parameters = SeatState(*zeros(64, *[torch.int32] * 3)), rows_of(64)
    step = StepRows(*zeros(8, torch.int32, torch.int32, torch.int64))
    places = zeros(8 * each, torch.int32, torch.int64, torch.int64)
    batch = Decodes(*places, *zeros(8, torch.int32), torch.zeros(8, 4, dtype=torch.int32))
    limits, drafts = zeros(8, torch.int32, torch.int32)
    verdict = Verdict(torch.zeros(64, 5, dtype=torch.int64), torch.zeros(64, dtype=torch.int64))
    optional = {
        "verdict": verdict,
        "limits": limits,
        "drafts": drafts,
        "history": torch.zeros(64, 99, dtype=torch.int32),
    }
    with compile_kernels(90, every=1) as kernels:
        drawn = torch.zeros(64, dtype=torch.int64)
        advance_seats(state, parameters, step, rows_of(8), batch, drawn, block_tokens=16, **optional)
    assert_resources(kernels)
