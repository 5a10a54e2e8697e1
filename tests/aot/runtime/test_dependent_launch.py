import pytest
import torch
from support.aot import compile_kernels

from tritonllm.kernels import linear
from tritonllm.kernels.compile.aot import pretend, target_of
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, has_dependent_launch


@pytest.mark.parametrize(("arch", "can"), [(80, False), (90, True), (100, True), ("gfx942", False)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_where_the_chip_can(arch, can, device):
    """Triton's option is left out elsewhere: AMD's backend does not know it."""
    with pretend(target_of(arch)):
        assert has_dependent_launch(torch.device(device)) == can
        assert dependent_launch(torch.device(device)) == ({"PDL": True, "launch_pdl": True} if can else {"PDL": False})


@pytest.mark.parametrize(("arch", "instructions"), [(80, set()), (90, {"PREEXIT", "ACQBULK"})])
def test_instructions(arch, instructions):
    with compile_kernels(arch) as kernels:
        linear(torch.empty(1, 1024), torch.empty(4096, 1024))
    assert {name for name in ("PREEXIT", "ACQBULK") if name in kernels[0].sass} == instructions


def test_without_a_driver():
    """Where nothing can be launched (the tuner asks for keys), nobody needs to know."""
    assert not has_dependent_launch(torch.device("cpu"))
