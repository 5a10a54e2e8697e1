import pytest
import torch

from tritonllm import env

if env.TRITON_INTERPRET:
    from support import interpreter_patches

    interpreter_patches.apply()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
