"""Programs that import vLLM run with this package in its place."""

import importlib
import json
import sys

import pytest
from support import forked_programs
from support.checkout import environment
from support.waiting import PATIENCE

import tritonllm
from tritonllm import as_vllm
from tritonllm.config import pooling_params, sampling_params
from tritonllm.config import prompts as inputs
from tritonllm.demo import model_path
from tritonllm.engine.data import outputs

SCRIPT = """
import json, sys
from importlib.metadata import version
from importlib.util import find_spec
import vllm
from vllm import LLM, EngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
parser.add_argument("--max-tokens", type=int)
args = parser.parse_args()
llm = LLM(sys.argv[1] if False else __MODEL__, max_model_len=256, num_gpu_blocks_override=64)
(out,) = llm.generate([TokensPrompt(prompt_token_ids=[5, 6, 7])],
                      SamplingParams(temperature=0, max_tokens=args.max_tokens), use_tqdm=False)
print(json.dumps([version("vllm"), vllm.__version__, find_spec("vllm") is not None, len(out.outputs[0].token_ids)]))
"""


def test_the_tokenizer_of_vllm():
    kept = as_vllm.get_tokenizer(model_path(), tokenizer_mode="hf", download_dir="nowhere")
    assert kept("a fox")["input_ids"] == as_vllm.get_tokenizer(str(model_path()))("a fox")["input_ids"]
    with pytest.raises(ValueError, match=r"tokenizer_mode=.slow.: .*leave it at 'auto'"):
        as_vllm.get_tokenizer(str(model_path()), tokenizer_mode="slow")


def run(*args, cwd):
    command = [sys.executable, "-m", "tritonllm.as_vllm", *args]
    return forked_programs.run(command, env=environment(), cwd=cwd, timeout=PATIENCE)


def test_a_script_and_its_options(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.replace("__MODEL__", repr(str(model_path()))))
    done = run("script.py", "--max_tokens=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [as_vllm.VERSION, as_vllm.VERSION, True, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from vllm import ModelRegistry", "tritonllm has no equivalent of vllm.ModelRegistry; of vllm it has LLM, "),
        ("import vllm.multimodal", "tritonllm has no equivalent of vllm.multimodal; of vllm it has LLM, LLMEngine, "),
        ("import vllm; vllm.nothing", "tritonllm has no equivalent of vllm.nothing; of vllm it has LLM, "),
        ("from vllm.outputs import SamplingParams", "SamplingParams is in vllm, vllm.sampling_params"),
        ("import vllm.v1.worker.utils", "tritonllm has no equivalent of vllm.v1.worker; of vllm it has LLM, "),
        ("from vllm.lora.request import LoRARequest; LoRARequest('a', 1, 'b')", "adapters are not supported"),
    ],
)
def test_what_is_not_there_says_so(tmp_path, line, message):
    (tmp_path / "script.py").write_text(line)
    done = run("script.py", cwd=tmp_path)
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1]


def test_modules_run_too_and_help(tmp_path):
    (tmp_path / "tool.py").write_text("import sys, vllm; print(sys.argv[1:], vllm.__name__)")
    assert run("-m", "tool", "a", "-b", cwd=tmp_path).stdout.strip() == "['a', '-b'] vllm"
    assert "usage: python -m tritonllm.as_vllm" in run("--help", cwd=tmp_path).stdout
    assert run(cwd=tmp_path).returncode == 2


def test_every_name_is_there():
    for module, names in as_vllm.MODULES.items():
        assert module == "vllm" or module.rpartition(".")[0] in as_vllm.MODULES, module
        for name, value in names.items():
            if isinstance(value, str) and ":" in value:
                home, _, attribute = value.partition(":")
                assert hasattr(importlib.import_module(home), attribute), (module, name)


def test_all_that_has_a_name_of_vllms_can_be_imported_by_it():
    names = {name for module in as_vllm.MODULES.values() for name in module}
    assert set(tritonllm.__all__) - {"quantize_checkpoint"} <= names  # a file's format is llm-compressor's there
    for module in (outputs, sampling_params, pooling_params, inputs):
        classes = {value.__name__ for value in vars(module).values() if isinstance(value, type)}
        own = {name for name in classes if getattr(module, name, None).__module__ == module.__name__}
        assert own <= names, module.__name__


def test_a_script_asks_whether_a_name_is_there(tmp_path):
    (tmp_path / "script.py").write_text(
        "import vllm\nfrom vllm import AsyncEngineArgs, AsyncLLMEngine\nfrom vllm.v1.engine.async_llm import AsyncLLM\n"
        "try:\n    from vllm.sampling_params import Nothing\nexcept ImportError:\n    Nothing = None\n"
        "print(hasattr(vllm, 'Nothing'), AsyncLLM is AsyncLLMEngine, Nothing, AsyncEngineArgs('m').model)"
    )
    done = run("script.py", cwd=tmp_path)
    assert done.stdout.strip() == "False True None m", done.stderr
