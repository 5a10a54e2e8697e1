import pytest
import torch
from support.mechanism_configs import MECHANISMS
from support.real_configs import LLAMA_3_1_8B, QWEN3_0_6B

from tritonllm.engine.step.launch_policy import host_bound_tokens
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.interface import LayerWork

MODELS = {name.split(" (")[0]: config for name, config in MECHANISMS.items()}
MODELS |= {"qwen3-0.6b": QWEN3_0_6B, "llama-3.1-8b": LLAMA_3_1_8B}


@pytest.mark.parametrize(
    ("model", "tokens"),
    [("qwen3-0.6b", 17163), ("llama-3.1-8b", 1237), ("qwen3-30b-a3b", 8437), ("glm-4.5-air", 1108)],
)
def test_of_published_models(model, tokens):
    """Of experts a token meets the chosen ones; the largest layer decides."""
    decoder = Decoder(
        spec_from_config(MODELS[model]), dtype=torch.bfloat16, device=torch.device("meta"), max_model_len=64
    )
    assert host_bound_tokens(decoder.work) == tokens


def test_the_largest_layer_decides():
    assert host_bound_tokens([LayerWork(10**8, False), LayerWork(10**9, False)]) == 270
    assert host_bound_tokens([LayerWork(10**9, True)]) == 480
    assert host_bound_tokens([LayerWork(0, False)]) > 10**9
    assert host_bound_tokens([]) == 0
