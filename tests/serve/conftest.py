import pytest
from support.server import running_server

from tritonllm import LLM
from tritonllm.demo import model_path


@pytest.fixture(scope="package")
def server():
    """One for the tests that leave it as they found it."""
    with running_server("--max-body-bytes", "100000") as running:
        yield running


@pytest.fixture(scope="package")
def llm():
    """The same model offline."""
    return LLM(str(model_path()))
