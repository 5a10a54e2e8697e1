"""Scripts in the style of vLLM's offline examples, run with only the import changed."""

import argparse
import dataclasses
import json
import logging
import shutil

import numpy as np
import pytest
import torch

from tritonllm import (
    LLM,
    CompletionOutput,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from tritonllm.config import prompts as inputs
from tritonllm.demo import model_path
from tritonllm.engine.loop.metrics import Counter, Gauge, Histogram, Vector

MODEL = str(model_path())
SPECULATION = ("drafts", "accepted_tokens", "accepted_tokens_per_pos")
PROMPTS = ["Once upon a time", "The capital of France is", "One day, a little"]


@pytest.fixture(scope="module")
def llm():
    return LLM(model=MODEL, max_model_len=512, num_gpu_blocks_override=128)


def greedy(**kwargs):
    return SamplingParams(temperature=0, **{"max_tokens": 6, **kwargs})


def ids(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_basic(llm):
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95), False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert isinstance(output, RequestOutput) and isinstance(output.outputs[0], CompletionOutput)
        assert output.prompt == prompt
        assert output.outputs[0].text


def test_fields_of_outputs(llm):
    llm.engine.add_request("a", PROMPTS[0], greedy(max_tokens=2))
    seen = []
    while llm.engine.has_unfinished_requests():
        seen += llm.engine.step()
    assert [output.outputs[0].finished() for output in seen] == [output.finished for output in seen] == [False, True]
    for name in ("lora_request", "encoder_prompt", "encoder_prompt_token_ids"):
        assert getattr(seen[-1], name) is None
    assert seen[-1].outputs[0].lora_request is None


def test_arguments_of_vllms_methods(llm):
    (one,) = llm.generate(PROMPTS[0], greedy(), use_tqdm=False, tokenization_kwargs=None)
    message = [{"role": "user", "content": "What is 47 + 38?"}]
    assert len(llm.chat(message, greedy(), use_tqdm=False, tokenization_kwargs=None)) == 1
    assert len(llm.embed(PROMPTS[0], use_tqdm=False, tokenization_kwargs=None)) == len(one.outputs)
    assert len(llm.score("a", ["b", "c"], use_tqdm=False, tokenization_kwargs=None)) == 2
    kwargs = {"tokenization_kwargs": {"truncation": True}}
    calls = [
        lambda: llm.generate("a", **kwargs),
        lambda: llm.chat(message, **kwargs),
        lambda: llm.score("a", "b", **kwargs),
    ]
    calls += [
        lambda method=method: method("a", **kwargs) for method in (llm.encode, llm.embed, llm.classify, llm.reward)
    ]
    for call in calls:
        with pytest.raises(ValueError, match="tokenization_kwargs="):
            call()
    assert llm.reset_prefix_cache(reset_running_requests=False, reset_connector=False)
    with pytest.raises(ValueError, match="reset_running_requests=True"):
        llm.reset_prefix_cache(reset_running_requests=True)
    assert llm.model_config is llm.llm_engine.model_config and llm.model_config.max_model_len == 512


def test_what_an_engine_says_of_itself(llm, caplog):
    engine = llm.llm_engine
    for name in "ab":
        engine.add_request(name, PROMPTS[0], greedy(max_tokens=2))
    assert engine.get_num_unfinished_requests() == 2
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.get_num_unfinished_requests() == 0
    with caplog.at_level(logging.INFO, "tritonllm"):
        engine.do_log_stats()
    assert "generated_tokens=" in caplog.text


def test_traces_as_scripts_ask_for_them(llm, tmp_path):
    """vLLM's example simple_profiling.py."""
    with pytest.raises(ValueError, match="torch_profiler_dir"):
        llm.start_profile()
    with pytest.raises(ValueError, match="torch_profiler_dir"):
        llm.stop_profile()
    settings = {"max_model_len": 256, "num_gpu_blocks_override": 64}
    with pytest.raises(ValueError, match="unknown key 'folder'"):
        LLM(model=MODEL, profiler_config={"folder": "a"}, **settings)
    folder = tmp_path / "profile"
    where = {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_use_gzip": False}
    with pytest.raises(ValueError, match="leave out data_parallel_size"):
        LLM(model=MODEL, profiler_config=where, data_parallel_size=2, **settings)
    traced = LLM(model=MODEL, profiler_config=where, **settings)
    with pytest.raises(RuntimeError, match="no trace is written: call start_profile first"):
        traced.stop_profile()
    file = traced.start_profile("mine")
    with pytest.raises(RuntimeError, match=r"a trace is written already.*: call stop_profile first"):
        traced.start_profile()
    outputs = traced.generate(PROMPTS, greedy(), use_tqdm=False)
    assert traced.stop_profile() == file and [str(path) for path in folder.iterdir()] == [file]
    names = [event.get("name", "") for event in json.loads((folder / file).read_text())]
    assert sum(name.startswith("step") for name in names) >= 6, set(names)
    assert ids(outputs) == ids(llm.generate(PROMPTS, greedy(), use_tqdm=False))
    assert traced.start_profile() != file


def test_metrics_as_scripts_read_them():
    """vLLM's examples metrics.py and spec_decode.py."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    llm = LLM(model=MODEL, max_model_len=256, num_gpu_blocks_override=64, speculative_config=drafts)
    before = {metric.name: metric for metric in llm.get_metrics()}
    outputs = llm.generate(["one two one two one two"] * 2, greedy(max_tokens=20), use_tqdm=False)
    found = {metric.name: metric for metric in llm.get_metrics()}
    assert all(metric.labels == {"model_name": MODEL, "engine": "0"} for metric in found.values())
    assert before.keys() == found.keys()
    made, taken, places = (found[f"vllm:spec_decode_num_{name}"] for name in SPECULATION)
    assert isinstance(made, Counter) and isinstance(taken, Counter) and isinstance(places, Vector)
    assert made.value > 0 and sum(places.values) == taken.value and len(places.values) == 3
    produced = found["vllm:generation_tokens"]
    assert isinstance(produced, Counter) and before["vllm:generation_tokens"].value == 0
    assert produced.value == sum(len(output.outputs[0].token_ids) for output in outputs)
    running = found["vllm:num_requests_running"]
    assert isinstance(running, Gauge) and running.value == 0
    assert not any(isinstance(metric, Histogram) for metric in found.values())


def test_chat(llm):
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": [{"type": "text", "text": "What is 47 + 38?"}]},
    ]
    (one,) = llm.chat(conversation, greedy(), use_tqdm=False)
    two = llm.chat([conversation] * 2, sampling_params=greedy(), use_tqdm=False, lora_request=None)
    assert ids(two) == ids([one]) * 2


@pytest.mark.parametrize("messages", [{"role": "user", "content": "hi"}, None, "hi"])
def test_a_conversation_that_is_no_list(llm, messages):
    with pytest.raises(ValueError, match="messages must be a list of dicts"):
        llm.chat(messages)


def test_chat_with_tools(llm):
    tools = [{"type": "function", "function": {"name": "weather", "description": "now", "parameters": {}}}]
    template = (
        "{{ tools | tojson }}{{ '/think' if enable_thinking else '/no_think' }}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": "How warm is it?"}]
    (output,) = llm.chat(
        messages,
        sampling_params=greedy(),
        tools=tools,
        chat_template=template,
        chat_template_kwargs={"enable_thinking": False},
        chat_template_content_format="auto",
        use_tqdm=False,
    )
    assert '"weather"' in output.prompt and "/no_think" in output.prompt
    with pytest.raises(ValueError, match="image_url"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def test_engine_loop_from_a_command_line():
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = parser.parse_args(["--model", MODEL, "--max-model-len", "256", "--num-gpu-blocks-override", "64"])
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    work = [
        ("A robot may not", greedy(prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2, max_tokens=6)),
        ("What is it?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1, max_tokens=6)),
    ]
    done, request_id = {}, 0
    while work or engine.has_unfinished_requests():
        if work:
            prompt, params = work.pop(0)
            engine.add_request(str(request_id), prompt, params, lora_request=None)
            params.max_tokens = -1  # the engine has its own copy
            request_id += 1
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert [len(done[name].outputs) for name in "012"] == [1, 1, 2]
    assert engine.model_config.max_model_len == 256
    assert engine.get_tokenizer().eos_token == "<|im_end|>"


def test_prefix_caching_with_reset(llm):
    prefix = "You are an expert school principal, skilled in effectively managing faculty and staff. " * 2
    assert llm.reset_prefix_cache() is True
    cached = [llm.generate(prefix + end, greedy(), use_tqdm=False)[0].num_cached_tokens for end in ("Hi", "Ho")]
    assert cached[0] == 0 and cached[1] > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(prefix + "Hi", greedy(), use_tqdm=False)[0].num_cached_tokens == 0
    assert llm.llm_engine is llm.engine
    llm.llm_engine.add_request("running", "Once", greedy())
    llm.llm_engine.step()
    assert llm.reset_prefix_cache() is False
    llm.llm_engine.abort_request(["running"])


def test_basic_with_default_sampling_params(tmp_path):
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    written = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 5, "eos_token_id": [2, 0]}
    (folder / "generation_config.json").write_text(json.dumps(written))
    args = vars(parser.parse_args(["--model", str(folder), "--max-model-len", "256", "--dtype", "float"]))
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    assert sampling_params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=5)
    assert max(map(len, ids(llm.generate(PROMPTS, use_tqdm=False)))) == 5
    sampling_params.max_tokens = 3
    assert max(map(len, ids(llm.generate(PROMPTS, sampling_params, use_tqdm=False)))) == 3
    assert llm.get_default_sampling_params().max_tokens == 5
    settings = {"max_model_len": 256, "num_gpu_blocks_override": 32}
    vllm_defaults = LLM(str(folder), generation_config="vllm", **settings)
    assert vllm_defaults.get_default_sampling_params() == SamplingParams()
    elsewhere = LLM(MODEL, generation_config=str(folder), **settings)
    assert elsewhere.get_default_sampling_params().top_k == 20
    with pytest.raises(ValueError, match=r"generation_config=.*nowhere"):
        LLM(MODEL, generation_config="nowhere")
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ValueError, match=r"generation_config.json: top_p .*generation_config='vllm'"):
        LLM(str(folder), **settings)


def test_token_prompts(llm):
    token_ids = llm.get_tokenizer().encode(PROMPTS[1])
    (expected,) = ids(llm.generate(TextPrompt(prompt=PROMPTS[1]), greedy(), use_tqdm=False))
    array = np.array(token_ids)
    forms = [
        TokensPrompt(prompt_token_ids=token_ids),
        inputs.TokensPrompt(prompt_token_ids=array),
        {"prompt_token_ids": torch.tensor(token_ids, dtype=torch.int32)},
        {"prompt": PROMPTS[1], "multi_modal_data": None, "mm_processor_kwargs": {}},
        array.astype(np.uint16),
        list(array),
    ]
    assert ids(llm.generate(forms, greedy(), use_tqdm=False)) == [expected] * len(forms)
    batches = [np.stack([array, array]), torch.stack([torch.tensor(token_ids)] * 2)]
    for batch in batches:
        assert ids(llm.generate(batch, greedy(), use_tqdm=False)) == [expected] * 2
    for one in (array, torch.tensor(token_ids), list(array)):
        (output,) = llm.generate(one, greedy(), use_tqdm=False)
        assert output.prompt_token_ids == token_ids and type(output.prompt_token_ids[0]) is int
    with pytest.raises(ValueError, match=r"got a dict with .*multi_modal_data"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": "x"}}, greedy(), use_tqdm=False)
    with pytest.raises(ValueError, match="one dimension"):
        llm.generate([np.zeros((2, 2), dtype=np.int64)], greedy())
    with pytest.raises(ValueError, match="must be integers"):
        llm.generate(np.array([1.5]), greedy())


def test_engine_args_as_keywords():
    args = EngineArgs(
        model=MODEL, max_model_len=256, num_gpu_blocks_override=32, limit_mm_per_prompt={}, tensor_parallel_size=1
    )
    llm = LLM(**(dataclasses.asdict(args) | {"seed": None, "enable_chunked_prefill": True, "swap_space": 4}))
    bars = []

    def bar(*args, **kwargs):
        from tqdm import tqdm

        bars.append(kwargs["total"])
        return tqdm(*args, **kwargs, leave=False)

    base = greedy()
    params = [base.clone() for _ in PROMPTS]
    for index, one in enumerate(params):
        one.max_tokens = index + 1
    assert [len(tokens) for tokens in ids(llm.generate(PROMPTS, params, bar))] == [1, 2, 3]
    assert bars == [3] and base.max_tokens == 6
    with pytest.raises(ValueError, match="lora_request="):
        llm.generate(PROMPTS, params, False, ["adapter"])


def test_the_tokenizers_eos_token_ends_an_output(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    llm = LLM(str(folder), max_model_len=256, num_gpu_blocks_override=32)
    for token in (0, 2, 7):  # config.json's, the tokenizer's <|im_end|>, generation_config.json's
        (output,) = llm.generate("Once", SamplingParams(allowed_token_ids=[token]), use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
    (output,) = llm.generate("Once", SamplingParams(allowed_token_ids=[8], max_tokens=3), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"


def test_nothing_to_score(llm):
    assert llm.score([], [], use_tqdm=False) == llm.score("a", [], use_tqdm=False) == []
    with pytest.raises(ValueError, match="data_1 has 0 entries and data_2 has 1"):
        llm.score([], ["a"])


def test_priorities_in_an_array():
    llm = LLM(model=MODEL, max_model_len=64, num_gpu_blocks_override=16, scheduling_policy="priority")
    for kind in (np.array, torch.tensor, list, lambda values: list(np.array(values))):
        assert len(llm.generate(PROMPTS[:2], greedy(max_tokens=1), use_tqdm=False, priority=kind([1, 2]))) == 2
    with pytest.raises(ValueError, match=r"prompts\[0\]: priority must be an integer, got 1.5"):
        llm.generate(PROMPTS[:2], greedy(max_tokens=1), use_tqdm=False, priority=np.array([1.5, 2]))
