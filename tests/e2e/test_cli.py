"""The command line: arguments, exit codes and formats with an engine that repeats; then whole runs."""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import forked_programs
from support.engines import tiny_checkpoint, tiny_llm
from support.tiny_models import tiny_config, write_checkpoint
from support.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

from tritonllm import SamplingParams
from tritonllm.cli import main
from tritonllm.config.sampling_params import RequestOutputKind
from tritonllm.engine.data.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

CLOSING_LINE = re.compile(
    r"\[\d+ prompt \+ \d+ generated tokens in [\d.]+ s \| TTFT (median )?\d+ ms \| [\d.]+ tokens/s"
    r" \| prefix cache \d+/\d+ tokens\]"
)


class RepeatingLLM:
    """Stands in for LLM and its engine: answers a prompt with its own words, one a step. Refuses the word `refuse`."""

    logprob = -0.5

    def __init__(self, model, **options):
        self.engine, self.model, self.options = self, model, options
        self.requests = {}
        self.before_step = lambda: None

    def __call__(self, model, **options):
        self.model, self.options = model, options
        return self

    def render_chat(self, conversation):
        return "".join(f"<{message['role']}> {message['content']} " for message in conversation)

    def add_request(self, request_id, prompt, params, *, priority=0):
        if prompt == "refuse":
            raise ValueError("prompt is refused")
        self.requests[request_id] = {"prompt": prompt, "params": params, "priority": priority, "step": 0}

    def step(self):
        self.before_step()
        return [output for request_id in list(self.requests) if (output := self._advance(request_id))]

    def _advance(self, request_id):
        request = self.requests[request_id]
        words, params = request["prompt"].split(), request["params"]
        request["step"] += 1
        end = request["step"]
        finished = end == len(words)
        if finished:
            del self.requests[request_id]
        if params.output_kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        start = end - 1 if params.output_kind is RequestOutputKind.DELTA else 0
        completions = [
            CompletionOutput(
                index=index,
                text="".join(f" {word}" for word in words[start:end]),
                token_ids=list(range(start, end)),
                logprobs=None
                if params.logprobs is None
                else [{i: Logprob(self.logprob, 1, "x")} for i in range(start, end)],
                finish_reason="stop" if finished else None,
            )
            for index in range(params.n)
        ]
        metrics = RequestMetrics(arrival_time=1.0, first_token_time=1.25, finished_time=3.0)
        return RequestOutput(request_id, request["prompt"], words, None, completions, finished, metrics, 1)


@pytest.fixture
def llm():
    return RepeatingLLM("")


def wrong_usage(argv, llm, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv, make_llm=llm)
    assert stopped.value.code == 2
    assert llm.model == "", "the model was loaded before the arguments were checked"
    return capsys.readouterr().err


def test_one_prompt_streams(llm, capsys):
    shown = []
    llm.before_step = lambda: shown.append(capsys.readouterr().out)
    assert main(["generate", "m", "--prompt", "a b c"], make_llm=llm) == 0
    last = capsys.readouterr()
    assert [*shown, last.out] == ["", " a", " b", " c\n"]
    assert (
        last.err == "[3 prompt + 3 generated tokens in 2.00 s | TTFT 250 ms | 1.5 tokens/s | prefix cache 1/3 tokens]\n"
    )


def test_no_stream(llm, capsys):
    shown = []
    llm.before_step = lambda: shown.append(capsys.readouterr().out)
    assert main(["generate", "m", "--prompt", "a b", "--no-stream"], make_llm=llm) == 0
    assert [*shown, capsys.readouterr().out] == ["", "", " a b\n"]


def test_several_prompts_keep_their_order(llm, capsys):
    """The second ends first."""
    assert main(["generate", "m", "--prompt", "a b c", "--prompt", "d"], make_llm=llm) == 0
    captured = capsys.readouterr()
    assert captured.out == "=== 1/2: a b c\n a b c\n=== 2/2: d\n d\n"
    assert CLOSING_LINE.fullmatch(captured.err.strip())
    assert "4 prompt + 4 generated" in captured.err
    assert "TTFT median" in captured.err


def test_several_continuations(llm, capsys):
    assert main(["generate", "m", "--prompt", "a b", "--n", "2"], make_llm=llm) == 0
    assert capsys.readouterr().out == "=== 1/1 (1/2): a b\n a b\n=== 1/1 (2/2): a b\n a b\n"


def test_json(llm, capsys):
    argv = ["generate", "m", "--prompt", "à b", "--prompt", "refuse", "--json", "--logprobs", "1"]
    assert main(argv, make_llm=llm) == 1
    captured = capsys.readouterr()
    first, second = map(json.loads, captured.out.splitlines())
    entry = {"token_id": 0, "token": "x", "logprob": -0.5, "rank": 1}
    assert first == {
        "index": 0,
        "prompt": "à b",
        "prompt_tokens": 2,
        "cached_tokens": 1,
        "ttft_seconds": 0.25,
        "total_seconds": 2.0,
        "outputs": [
            {
                "index": 0,
                "text": " à b",
                "token_ids": [0, 1],
                "finish_reason": "stop",
                "stop_reason": None,
                "logprobs": [[entry], [{**entry, "token_id": 1}]],
            }
        ],
    }
    assert second == {"index": 1, "prompt": "refuse", "error": "prompt is refused"}


def test_refused_prompt_leaves_the_others(llm, capsys):
    argv = ["generate", "m", "--prompt", "a", "--prompt", "refuse", "--prompt", "b"]
    assert main(argv, make_llm=llm) == 1
    captured = capsys.readouterr()
    assert captured.out == "=== 1/3: a\n a\n=== 3/3: b\n b\n"
    assert "error: prompt 2: prompt is refused" in captured.err


def test_prompt_file(llm, capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a b\n\n  c\n", encoding="utf-8")
    assert main(["generate", "m", "--prompt-file", str(file), "--json"], make_llm=llm) == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["a b", "  c"]


def test_stdin_is_one_prompt(llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert main(["generate", "m", "--json"], make_llm=llm) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "a\nb"


def test_chat(llm, capsys):
    assert main(["generate", "m", "--system", "Be brief.", "--prompt", "Hi", "--no-stream"], make_llm=llm) == 0
    assert capsys.readouterr().out == " <system> Be brief. <user> Hi\n"
    assert main(["generate", "m", "--chat", "--prompt", "Hi", "--json"], make_llm=llm) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["prompt"], result["outputs"][0]["text"]) == ("Hi", " <user> Hi")


def test_options_reach_the_engine(llm):
    argv = "generate m --prompt a --dtype float16 --device cpu --max-model-len 64 --block-size 8 --num-blocks 9"
    argv += " --max-num-seqs 3 --max-num-batched-tokens 77 --gpu-memory-utilization 0.5 --enforce-eager --compile"
    argv += " --kv-offloading-size 1.5 --kv-cache-dtype fp8 --calculate-kv-scales"
    argv += " --no-prefix-caching --tokenizer t --revision r --load-format dummy --trust-remote-code --priority -2"
    argv += " --model-impl transformers"
    llm.before_step = lambda: priorities.append(llm.requests["0"]["priority"])
    priorities = []
    assert main(argv.split(), make_llm=llm) == 0
    assert llm.model == "m"
    assert llm.options == {
        "dtype": "float16",
        "device": "cpu",
        "max_model_len": 64,
        "block_size": 8,
        "num_blocks": 9,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 77,
        "gpu_memory_utilization": 0.5,
        "kv_offloading_size": 1.5,
        "kv_cache_dtype": "fp8",
        "calculate_kv_scales": True,
        "enforce_eager": True,
        "compilation_config": 3,
        "enable_prefix_caching": False,
        "tokenizer": "t",
        "revision": "r",
        "load_format": "dummy",
        "model_impl": "transformers",
        "trust_remote_code": True,
        "policy": "priority",
    }
    assert priorities == [-2]


def test_a_connector_reaches_the_engine(llm):
    transfer = '{"kv_connector": "FileStore"}'
    argv = ["generate", "m", "--prompt", "a", "--kv-offloading-size", "1", "--kv-transfer-config", transfer]
    assert main(argv, make_llm=llm) == 0
    assert llm.options == {"kv_offloading_size": 1.0, "kv_transfer_config": transfer}


NULL_SCHEMA = {"json": '{"type":"null"}', "disable_any_whitespace": True}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", {"max_tokens": 256, "temperature": 0.0}),
        (
            "--max-tokens 5 --min-tokens 2 --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 7 --n 2 --stop X"
            " --stop Y --ignore-eos --presence-penalty 1 --frequency-penalty -1 --repetition-penalty 1.5",
            {
                "max_tokens": 5,
                "min_tokens": 2,
                "temperature": 0.5,
                "top_k": 3,
                "top_p": 0.9,
                "min_p": 0.1,
                "seed": 7,
                "n": 2,
                "stop": ["X", "Y"],
                "ignore_eos": True,
                "presence_penalty": 1.0,
                "frequency_penalty": -1.0,
                "repetition_penalty": 1.5,
            },
        ),
        (
            "--truncate-prompt-tokens -1 --regex a+",
            {
                "max_tokens": 256,
                "temperature": 0.0,
                "truncate_prompt_tokens": -1,
                "structured_outputs": {"regex": "a+"},
            },
        ),
        (
            "--thinking-token-budget 4 --stop X --stop-after-thought",
            {
                "max_tokens": 256,
                "temperature": 0.0,
                "thinking_token_budget": 4,
                "stop": ["X"],
                "stop_after_thought": True,
            },
        ),
        (
            "--choice yes --choice no",
            {"max_tokens": 256, "temperature": 0.0, "structured_outputs": {"choice": ["yes", "no"]}},
        ),
        (
            '--json-schema {"type":"null"}',
            {
                "max_tokens": 256,
                "temperature": 0.0,
                "structured_outputs": NULL_SCHEMA,
            },
        ),
    ],
)
def test_sampling_options(llm, options, expected):
    llm.before_step = lambda: seen.append(llm.requests["0"]["params"])
    seen = []
    assert main(["generate", "m", "--prompt", "a", "--no-stream", *options.split()], make_llm=llm) == 0
    assert seen == [SamplingParams(**expected, output_kind=RequestOutputKind.FINAL_ONLY)]


@pytest.mark.parametrize(
    "option",
    [["--speculative", "ngram:4"], ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}']],
)
def test_drafts_reach_the_engine(llm, option):
    assert main(["generate", "m", "--prompt", "a", *option], make_llm=llm) == 0
    assert llm.options == {"speculative_config": option[1]}


@pytest.mark.parametrize(("option", "model", "drafts"), [("small", "small", 4), ("owner/small:7", "owner/small", 7)])
def test_a_draft_model_reaches_the_engine(llm, option, model, drafts):
    assert main(["generate", "m", "--prompt", "a", "--draft", option], make_llm=llm) == 0
    config = {"method": "draft_model", "model": model, "num_speculative_tokens": drafts}
    assert llm.options == {"speculative_config": config}


def test_a_priority_for_each_prompt(llm):
    llm.before_step = lambda: seen.append([request["priority"] for request in llm.requests.values()])
    seen = []
    argv = ["generate", "m", "--prompt", "a", "--priority", "5", "--prompt", "b", "--priority", "1"]
    assert main(argv, make_llm=llm) == 0
    assert seen == [[5, 1]]
    assert llm.options["policy"] == "priority"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "hot"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--stop", ""], "stop"),
        (["--num-blocks", "0"], "num_blocks"),
        (["--kv-offloading-size", "-1"], "kv_offloading_size must be a number of GiB"),
        (["--kv-offloading-size", "much"], "kv-offloading-size"),
        (["--kv-transfer-config", "{}"], "kv_transfer_config: kv_connector is missing"),
        (["--dtype", "int3"], "dtype"),
        (["--speculative", "medusa:3"], "method must be one of ngram"),
        (["--speculative-config", "{}"], "method is missing"),
        (["--draft", "m:0"], "num_speculative_tokens must be an integer of at least 1"),
        (["--draft", ":4"], "needs model"),
        (["--device", "frob"], "device must be auto, cpu, cuda or cuda:N"),
        (["--max-num-batched-tokens", "10"], "max_num_batched_tokens"),
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--priority", "1", "--priority", "2"], "--priority: 2 values for 1 prompts"),
        (["--prompt-file", "x"], "not allowed with"),
        (["--surprise"], "--surprise"),
        (["--data-parallel-size", "2"], "serve and batch have --data-parallel-size, and LLM has data_parallel_size"),
        (["-dp=2"], "serve and batch have --data-parallel-size, and LLM has"),
        (["--regex", "a", "--choice", "b"], "not allowed with"),
        (["--choice", ""], "choice must be of strings"),
        (["--regex", "a", "--ignore-eos"], "leave ignore_eos out"),
    ],
)
def test_wrong_options(llm, capsys, options, names):
    assert names in wrong_usage(["generate", "m", "--prompt", "a", *options], llm, capsys)


@pytest.mark.parametrize("argv", [[], ["conjure"]])
def test_wrong_command(llm, capsys, argv):
    assert "COMMAND" in wrong_usage(argv, llm, capsys)


def test_no_prompt(llm, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert "stdin is empty" in wrong_usage(["generate", "m"], llm, capsys)
    monkeypatch.setattr("sys.stdin", None)
    assert "stdin is closed" in wrong_usage(["generate", "m"], llm, capsys)
    (tmp_path / "empty").write_text("\n \n")
    assert "empty is empty" in wrong_usage(["generate", "m", "--prompt-file", str(tmp_path / "empty")], llm, capsys)


def stdin_of(data):
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")


def test_text_that_is_not_utf8(llm, capsys, monkeypatch, tmp_path):
    """Whichever way it comes: where it is from, the byte, and its position, in bytes."""
    in_argument = os.fsdecode(b"\xc3\xa9t\xe9")
    for name in ("--prompt", "--system", "--stop"):
        argv = ["generate", "m", "--prompt", "a", name, in_argument]
        assert f"{name}{' (number 2)' if name == '--prompt' else ''} is not UTF-8: byte 0xe9 at position 3" in (
            wrong_usage(argv, llm, capsys)
        )
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"a\n\xe9\n")
    complaint = f"--prompt-file {file} is not UTF-8: byte 0xe9 at position 2"
    assert complaint in wrong_usage(["generate", "m", "--prompt-file", str(file)], llm, capsys)
    monkeypatch.setattr("sys.stdin", stdin_of(b"abc\xff"))
    assert "stdin is not UTF-8: byte 0xff at position 3" in wrong_usage(["generate", "m"], llm, capsys)


def test_byte_order_mark_and_line_ends(llm, capsys, monkeypatch, tmp_path):
    data = "\ufeffé b\r\nc\r\n".encode()
    (tmp_path / "prompts.txt").write_bytes(data)
    assert main(["generate", "m", "--prompt-file", str(tmp_path / "prompts.txt"), "--json"], make_llm=llm) == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["é b", "c"]
    monkeypatch.setattr("sys.stdin", stdin_of(data))
    assert main(["generate", "m", "--json"], make_llm=llm) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "é b\nc"


@pytest.mark.parametrize("command", ["generate", "info", "precompile", "bench throughput"])
@pytest.mark.parametrize("model", ["", " "])
def test_no_name_of_a_model(llm, capsys, command, model):
    assert "MODEL is empty" in wrong_usage([*command.split(), model], llm, capsys)


def test_json_has_no_infinity(llm, capsys, monkeypatch):
    """A banned token's log-probability is -inf, for which JSON has no word."""
    monkeypatch.setattr(RepeatingLLM, "logprob", -math.inf)
    assert main(["generate", "m", "--prompt", "a", "--json", "--logprobs", "1"], make_llm=llm) == 0
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert result["outputs"][0]["logprobs"] == [[{"token_id": 0, "token": "x", "logprob": None, "rank": 1}]]


def test_missing_prompt_file(llm, capsys):
    assert main(["generate", "m", "--prompt-file", "nowhere.txt"], make_llm=llm) == 1
    assert "nowhere.txt" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [ValueError, OSError, RuntimeError, ImportError])
def test_failure_is_one_line(capsys, kind):
    def broken(model, **options):
        raise kind("no such\n  thing")

    assert main(["generate", "m", "--prompt", "a"], make_llm=broken) == 1
    assert capsys.readouterr().err == "error: no such thing\n"
    assert main(["generate", "m", "--prompt", "a", "--debug"], make_llm=broken) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_is_not_hidden():
    def broken(model, **options):
        raise KeyError("layer")

    with pytest.raises(KeyError):
        main(["generate", "m", "--prompt", "a"], make_llm=broken)


def test_interrupted(llm, capsys):
    def press_ctrl_c():
        raise KeyboardInterrupt

    llm.before_step = press_ctrl_c
    assert main(["generate", "m", "--prompt", "a"], make_llm=llm) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["generate", "--help"], 0),
        (["generate", "--prompt", "a", "--top-p", "2"], 2),
    ],
)
def test_answers_without_torch(argv, code):
    script = "import sys; from tritonllm.cli import main\ntry: main(sys.argv[1:])\n"
    script += "except SystemExit as e: sys.exit(100 if 'torch' in sys.modules else e.code)"
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True)
    assert done.returncode == code, done.stderr


# From here on with the real engine.


def run(*argv: str, **kwargs) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tritonllm", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


def test_process_gives_what_the_engine_gives():
    """A process of its own, text from stdin, streamed: the same as LLM.generate here."""
    done = run("generate", str(tiny_checkpoint()), "--max-tokens", "12", input="the quick brown\n")
    (expected,) = tiny_llm().generate("the quick brown", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert (done.returncode, done.stdout) == (0, expected.outputs[0].text + "\n"), done.stderr
    assert CLOSING_LINE.fullmatch(done.stderr.strip())


def test_structured_output(capsys, tmp_path):
    """From a schema in a file; and a wrong expression is an error of its prompt."""
    (tmp_path / "schema.json").write_text(
        '{"type": "object", "properties": {"ok": {"type": "boolean"}}, '
        '"required": ["ok"], "additionalProperties": false}'
    )
    argv = ["generate", "--prompt", "a", "--max-tokens", "50", "--json-schema"]
    assert main([*argv, str(tmp_path / "schema.json"), "--json"]) == 0
    (result,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert isinstance(json.loads(result["outputs"][0]["text"])["ok"], bool)
    assert main(["generate", "--prompt", "a", "--regex", "("]) == 1
    assert "error: prompt 1: structured_outputs: regex cannot be used" in capsys.readouterr().err
    assert main([*argv, str(tmp_path / "nowhere.json")]) == 1
    assert "nowhere.json" in capsys.readouterr().err


def test_batch(capsys):
    """Sampled continuations are reproducible, a second identical prompt comes from the cache, a long one is refused."""
    argv = ["generate", str(tiny_checkpoint()), "--json", "--logprobs", "2", "--n", "2", "--ignore-eos"]
    argv += ["--max-tokens", "6", "--temperature", "1", "--seed", "3", "--block-size", "4", "--max-num-seqs", "2"]
    argv += ["--prompt", "the cat sat on the mat"] * 2 + ["--prompt", "the cat " * 200]
    assert main(argv) == 1
    captured = capsys.readouterr()
    first, second, refused = map(json.loads, captured.out.splitlines())
    assert [output["text"] for output in first["outputs"]] == [output["text"] for output in second["outputs"]]
    assert first["cached_tokens"] == 0 < second["cached_tokens"] < second["prompt_tokens"]
    assert [output["index"] for output in first["outputs"]] == [0, 1]
    assert first["outputs"][0]["token_ids"] != first["outputs"][1]["token_ids"]
    for output in first["outputs"]:
        assert (len(output["token_ids"]), output["finish_reason"]) == (6, "length")
        for token, entries in zip(output["token_ids"], output["logprobs"], strict=True):
            assert entries[0]["token_id"] == token
            assert sorted(entry["rank"] for entry in entries)[:2] == [1, 2]
    assert "max_model_len" in refused["error"]
    assert "error: prompt 3:" in captured.err


def test_chat_takes_the_template(capsys):
    argv = ["generate", str(tiny_checkpoint()), "--max-tokens", "8", "--json", "--system", "the dog", "--prompt", "fox"]
    assert main(argv) == 0
    messages = [{"role": "system", "content": "the dog"}, {"role": "user", "content": "fox"}]
    (expected,) = tiny_llm().chat(messages, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    result = json.loads(capsys.readouterr().out)
    assert result["prompt_tokens"] == len(expected.prompt_token_ids)
    assert result["outputs"][0]["text"] == expected.outputs[0].text


def test_default_model_does_sums(capsys):
    """No model named: the one in the package, whose training did not show this sum."""
    assert main(["generate", "--chat", "--prompt", "What is 47 + 66?"]) == 0
    assert capsys.readouterr().out == "47 + 66 = 113\n"


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["./nowhere"], "nowhere"),
        (["{model}", "--max-model-len", "999999"], "max_model_len"),
        (["{model}", "--tokenizer", "./nowhere"], "tokenizer"),
    ],
)
def test_model_that_cannot_be_had(capsys, argv, names):
    argv = [part.format(model=tiny_checkpoint()) for part in argv]
    assert main(["generate", "--prompt", "a", *argv]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert names in error


def test_info(capsys):
    assert main(["info", str(tiny_checkpoint())]) == 0
    rows = dict(line.strip().split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"tritonllm", "torch", "triton", "transformers"} < rows.keys()
    assert rows["architecture"] == "Qwen3ForCausalLM"
    assert rows["vocab_size"] == str(VOCAB_SIZE)


def test_info_of_no_model(capsys):
    assert main(["info", "./nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_reader_that_went_away():
    process = forked_programs.Popen(
        [sys.executable, "-m", "tritonllm", "info", str(tiny_checkpoint())], stdout=-1, stderr=-1, text=True
    )
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=300) == 141


SHELL = {  # what a shell does with the streams -> exit status and what is said
    "generate {model} --prompt a --max-tokens 200 --ignore-eos --json | true": (141, ""),
    "--help | true": (141, ""),
    "generate {model} <&-": (2, "stdin is closed"),
    "generate {model} --prompt a <&- >/dev/null": (0, "generated tokens"),
    "generate {model} --prompt a >&-": (2, "stdout is closed"),
    "info {model} >&-": (2, "stdout is closed"),
    "generate {model} --prompt a 2>&- >/dev/null": (0, ""),
    "generate ./nowhere --prompt a 2>&-": (1, ""),
    "info {model} >/dev/full": (1, "error: [Errno 28] No space left on device"),
    "generate {model} --prompt $'\\xff'": (2, "--prompt is not UTF-8: byte 0xff at position 0"),
    "generate {model} --chat --prompt a": (2, "the chat template cannot render these messages: only in verse"),
}


@pytest.mark.parametrize(
    "line",
    [line if "--help" in line or "info" in line else pytest.param(line, marks=pytest.mark.long) for line in SHELL],
)
def test_odd_terminals(line, tmp_path):
    """No traceback, and a status that scripts can tell apart."""
    status, says = SHELL[line]
    model = tiny_checkpoint()
    if "--chat" in line:
        model = shutil.copytree(model, tmp_path / "model")
        (model / "chat_template.jinja").write_text("{{ raise_exception('only in verse') }}")
    command = f"{sys.executable} -m tritonllm {line.format(model=model)}"
    command += "; exit ${PIPESTATUS[0]}" if "|" in line else ""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, env=buffered)
    assert done.returncode == status, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr and "Exception" not in done.stderr


def test_a_bad_variable_is_one_line():
    """It is read when the package is imported, before any command."""
    done = run("info", env={**os.environ, "TRITONLLM_CPU_BACKEND": "fast"})
    assert (done.returncode, done.stdout) == (1, "")
    expected = "error: TRITONLLM_CPU_BACKEND='fast': expected torch, reference, interpret or compile\n"
    assert done.stderr == expected


def test_ctrl_c_while_generating(tmp_path):
    """A model with no end in sight, interrupted after its first words."""
    length = 1 << 20
    config = tiny_config("qwen3", vocab_size=VOCAB_SIZE, max_position_embeddings=length)
    write_checkpoint(tmp_path, config)
    save_tokenizer(Path(tmp_path))
    argv = ["generate", str(tmp_path), "--prompt", "the", "--ignore-eos", "--max-tokens", str(length)]
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored, in a shell's background jobs
    process = forked_programs.Popen([sys.executable, "-m", "tritonllm", *argv], stdout=-1, stderr=-1, text=True)
    signal.signal(signal.SIGINT, ours)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (130, "\ninterrupted\n")
