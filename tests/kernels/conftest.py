import pytest
import torch

from tritonllm import env

if env.TRITON_INTERPRET:
    from support import faster_interpreter, interpreter_patches

    interpreter_patches.apply()
    faster_interpreter.apply()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
