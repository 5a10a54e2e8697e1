"""A published model, SmolLM2-135M-Instruct, beside transformers: on the GPU if there is one, else on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import smollm2
from tritonllm import LLM

MAX_MODEL_LEN = 1024


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = smollm2.missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            if torch.cuda.is_available():
                item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def folder() -> Path:
    return smollm2.folder()


@pytest.fixture(scope="session")
def settings(folder: Path, device: torch.device) -> dict[str, Any]:
    """Of every engine here; float32, in which the greedy tokens are exactly those of transformers."""
    return {"model": str(folder), "dtype": "float32", "device": device.type, "max_model_len": MAX_MODEL_LEN}


@pytest.fixture(scope="session")
def llm(settings: dict[str, Any]) -> LLM:
    return LLM(**settings, max_num_seqs=8, num_blocks=512)


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def reference(folder: Path, device: torch.device) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
