"""What a trainer does with an engine in its process, as TRL's GRPO trainer does in its mode "colocate": the names are
vLLM's, and the sequence of calls is the trainer's. New weights must give the tokens of a fresh engine with them."""

import importlib
import sys
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tritonllm import LLM, SamplingParams, as_vllm
from tritonllm.demo import model_path
from tritonllm.engine.data.asleep import AsleepError

PROMPTS = ["There was a fox named", "47 + 38 =", "Once upon a time"]
SIZES = {"max_model_len": 128, "num_gpu_blocks_override": 64, "max_num_seqs": 8, "seed": 3, "dtype": "float32"}
PARAMS = {
    "n": 1,
    "repetition_penalty": 1.0,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 12,
    "logprobs": 0,
    "seed": 7,
}


@pytest.fixture(scope="module")
def trained():
    """A trainer's model: the demo model with other weights."""
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def fresh(trained, tmp_path_factory):
    """An engine that was started with these weights."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    copytree(model_path(), folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    state = {name: parameter.detach().contiguous() for name, parameter in trained.named_parameters()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return LLM(str(folder), **SIZES, logprobs_mode="processed_logprobs")


@pytest.fixture(scope="module")
def vllm():
    """The package as the trainer imports it."""
    before = [*sys.meta_path]
    as_vllm.install()
    yield importlib.import_module("vllm")
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def llm(vllm):
    return vllm.LLM(
        model=str(model_path()),
        tensor_parallel_size=1,
        gpu_memory_utilization=0.3,
        max_num_batched_tokens=4096,
        model_impl="auto",
        enable_sleep_mode=True,
        logprobs_mode="processed_logprobs",
        quantization=None,
        **SIZES,
    )


def completions(llm):
    outputs = llm.generate(PROMPTS, sampling_params=SamplingParams(**PARAMS), use_tqdm=False)
    ids = [output.outputs[0].token_ids for output in outputs]
    return ids, [[next(iter(row.values())).logprob for row in output.outputs[0].logprobs] for output in outputs]


def test_a_training_step(llm, trained, fresh):
    """Twice: generate, sleep while the trainer computes, take the weights one by one, generate with these."""
    first = completions(llm)
    llm.sleep(level=2)
    for _ in range(2):
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")  # the trainer's way around buffers that level 2 drops
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        for name, parameter in trained.named_parameters():
            assert model.load_weights([(name, parameter.data)]) == {name}
        assert llm.reset_prefix_cache()
        llm.wake_up(tags=["kv_cache"])
        ids, scores = completions(llm)
        expected_ids, expected_scores = completions(fresh)
        assert ids == expected_ids != first[0]
        assert all(
            torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in zip(scores, expected_scores, strict=True)
        )
        llm.sleep(level=2)
    llm.wake_up()
    llm.reload_weights()
    assert completions(llm)[0] == first[0]


def test_the_trainer_computes_the_same_log_probabilities(trained, fresh):
    """Of its own model, at the temperature that tokens were drawn with: what importance sampling compares."""
    ids, scores = completions(fresh)
    tokenizer = fresh.get_tokenizer()
    for prompt, output, found in zip(PROMPTS, ids, scores, strict=True):
        before = tokenizer.encode(prompt)
        with torch.no_grad():
            logits = trained(torch.tensor([[*before, *output]])).logits[0, len(before) - 1 : -1]
        rows = (logits / PARAMS["temperature"]).log_softmax(-1)
        assert torch.allclose(torch.tensor(found), rows[range(len(output)), output], atol=1e-3)


def test_weights_that_were_dropped_come_back_from_the_trainer_alone(llm, trained, fresh):
    """In any number of calls; requests are refused until all are there."""
    weights = [*trained.named_parameters()]
    llm.sleep(level=2)
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    with pytest.raises(AsleepError, match=r"wake_up\(tags=\['weights'\]\) first"):
        model.load_weights(weights)
    llm.wake_up()
    model.load_weights(weights[1:])
    with pytest.raises(AsleepError, match=r"the weights were dropped by sleep.*load all of them"):
        completions(llm)
    model.load_weights(iter(weights[:1]))
    assert completions(llm)[0] == completions(fresh)[0]
    llm.reload_weights()


def test_functions_reach_the_model(llm, trained):
    assert llm.apply_model(lambda model: sorted(model.state_dict())[:1]) == [sorted(llm.engine.model.state_dict())[:1]]
    weights = [*trained.named_parameters()]
    (names,) = llm.apply_model(lambda model: model.load_weights(weights[:2]))
    assert names == {name for name, _ in weights[:2]}
    found = llm.collective_rpc(lambda worker, a, b: (worker.rank, a, b), args=(1,), kwargs={"b": 2})
    assert found == [(0, 1, 2)]
    with pytest.raises(ValueError, match=r"method must be 'reload_weights', or .* a function, got 'save'"):
        llm.collective_rpc("save")
    llm.reload_weights()


def test_weights_that_do_not_fit_are_named(llm, trained):
    name, parameter = next(iter(trained.named_parameters()))
    before = completions(llm)[0]
    load = llm.llm_engine.load_weights
    for weights, message in (
        ([("model.nothing.weight", parameter)], "tensor model.nothing.weight has no place"),
        ([(name, parameter[1:])], rf"tensor {name} has shape"),
        ([(name, parameter * torch.nan)], f"tensor {name} has values that are NaN"),
        ([(name, parameter.to(torch.int8))], f"tensor {name} is I8"),
    ):
        with pytest.raises(ValueError, match=message):
            load(weights)
    assert load([]) == set() and completions(llm)[0] == before
    llm.engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="load_weights: requests are unfinished"):
        load([(name, parameter)])
    llm.engine.abort_request("a")


def test_a_tied_output_projection_is_the_embeddings(tmp_path):
    """Some trainers send it, too."""
    stored = {}
    for file in Path(model_path()).glob("*.safetensors"):
        stored |= load_file(file)
    llm = LLM(str(model_path()), **SIZES)
    before = completions(llm)[0]
    embedding = next(name for name in stored if "embed" in name)
    llm.llm_engine.load_weights([*stored.items(), ("lm_head.weight", stored[embedding])])
    assert completions(llm)[0] == before
