"""`tritonllm precompile`: what it says, what it refuses, and, on a GPU, that a start then compiles nothing."""

import json
import os
import subprocess
import sys

import pytest
import torch
from support.checkout import environment
from support.engines import tiny_checkpoint
from support.real_configs import QWEN3_0_6B
from support.tiny_configs import WITHOUT_FAMILY, tiny_config
from support.waiting import PATIENCE
from triton import knobs
from triton.runtime import cache

from tritonllm.cli import main
from tritonllm.engine.start import precompile
from tritonllm.kernels.compile.cache_folder import MARK

SMALL = ["--max-num-seqs", "4", "--max-num-batched-tokens", "16"]


@pytest.fixture
def found(monkeypatch):
    """The kernels that would be compiled; and what the command changes about Triton's cache is undone."""
    lists = []
    monkeypatch.setattr(precompile, "compile_in_parallel", lambda wanted, jobs: lists.append((wanted, jobs)))
    monkeypatch.setattr(cache, "triton_key", cache.triton_key)
    with knobs.cache.scope(), knobs.compilation.scope():
        yield lists


def test_says_what_it_built(found, tmp_path, capsys):
    folder = tmp_path / "kernels"
    options = ["--target", "sm_90", "-o", str(folder), "--dtype", "bfloat16", "--jobs", "3", *SMALL]
    assert main(["precompile", str(tiny_checkpoint()), *options]) == 0
    ((wanted, jobs),) = found
    assert jobs == 3 and wanted[-1].name == "cuda_utils"
    kernels = wanted[:-1]
    assert {kernel.target.arch for kernel in kernels} == {90}
    said = capsys.readouterr().out
    assert said.startswith(
        f"{len(kernels)} kernels of Qwen3ForCausalLM (bfloat16) for sm_90 with tables of NVIDIA H200"
    )
    assert f"in {folder}: {len(kernels)} compiled, 0 there already" in said
    assert json.loads((folder / MARK).read_text())["triton"]


def test_other_gpus_and_options_have_other_kernels(found, tmp_path, capsys):
    def signatures(*options):
        assert main(["precompile", str(tiny_checkpoint()), "-o", str(tmp_path), *options]) == 0
        return {str((kernel.source.signature, kernel.options)) for kernel in found[-1][0][:-1]}

    a100 = signatures("--target", "sm_80", *SMALL)
    assert "with built-in launch configurations" in capsys.readouterr().out
    assert a100.isdisjoint(signatures("--target", "sm_90", *SMALL))
    assert a100 != signatures("--target", "sm_80", "--dtype", "float16", *SMALL)
    assert a100 != signatures("--target", "sm_80", "--deterministic", *SMALL)
    assert not any("*fp8" in signature for signature in a100)
    assert any("*fp8e4nv" in signature for signature in signatures("--target", "sm_90", "--kv-cache-dtype=fp8", *SMALL))
    assert main(["precompile", str(tiny_checkpoint()), "--target=sm_80", "--kv-cache-dtype=fp8"]) == 1
    assert (
        "kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or more, this one has 8.0"
        in capsys.readouterr().err
    )
    assert a100 <= signatures("--target", "sm_80", "--max-num-seqs", "4", "--max-num-batched-tokens", "2048")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--target", "gfx942"], "--target must be sm_80, sm_90, sm_100"),
        (["--target", "sm_70"], "--target must be sm_80, sm_90, sm_100"),
        (["--target", "sm_90", "--max-model-len", "100000"], "beyond the model's max_position_embeddings"),
        (["--target", "sm_90", "-o", __file__], "File exists"),
    ],
)
def test_refuses(found, capsys, options, complaint):
    assert main(["precompile", str(tiny_checkpoint()), *options]) == 1
    assert complaint in capsys.readouterr().err
    assert found == []


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--max-num-seqs", "0"], "max_num_seqs must be"),
    ],
)
def test_wrong_usage(found, capsys, options, complaint):
    with pytest.raises(SystemExit) as stopped:
        main(["precompile", str(tiny_checkpoint()), "--target", "sm_90", *options])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err
    assert found == []


def test_without_a_gpu_it_needs_a_target(found, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["precompile", str(tiny_checkpoint())]) == 1
    assert "there is no GPU here" in capsys.readouterr().err


def test_models_that_run_through_transformers_have_no_list(found, capsys, tmp_path):
    config = tiny_config("llama") | {"architectures": ["BitNetForCausalLM"], "model_type": WITHOUT_FAMILY}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["precompile", str(tmp_path), "--target", "sm_90"]) == 1
    assert "runs through transformers" in capsys.readouterr().err


COUNT = """
import json, sys, triton
from tritonllm import LLM, SamplingParams
from tritonllm.kernels.compile.monitor import MONITOR
llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, num_blocks=2048, max_model_len=4096,
          max_num_seqs=16, max_num_batched_tokens=1024, kernel_cache=sys.argv[2] or None, kv_cache_dtype=sys.argv[3])
at_ready = MONITOR.compiled, MONITOR.loaded
prompts = [list(range(n)) for n in (1, 700, 33, 128, 2, 511, 90, 300)]
kinds = ({"temperature": 0}, {"temperature": 0.8}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.1, "seed": 3})
llm.generate(prompts, [SamplingParams(max_tokens=9, ignore_eos=True, **kinds[i % 4]) for i in range(8)], use_tqdm=False)
print(json.dumps([*at_ready, llm.engine.stats.compilations_after_ready]))
"""


def start(model, kernels, cache_folder, kv_cache_dtype="auto"):
    """``(compiled, loaded, compiled or loaded once ready)`` by the engine's own process."""
    environ = environment(TRITON_CACHE_DIR=str(cache_folder))
    command = [sys.executable, "-c", COUNT, model, kernels, kv_cache_dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_a_start_with_the_folder_compiles_nothing(tmp_path, record_property, kv_cache_dtype):
    if kv_cache_dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with float8")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    options = ["--max-model-len", "4096", "--max-num-seqs", "16", "--max-num-batched-tokens", "1024"]
    options += ["--kv-cache-dtype", kv_cache_dtype]
    capability = torch.cuda.get_device_capability()
    target = ["--target", f"sm_{capability[0]}{capability[1]}", "--gpu", torch.cuda.get_device_name()]
    where = [str(tmp_path), "-o", str(tmp_path / "kernels")]
    command = [sys.executable, "-m", "tritonllm", "precompile", *where, *options, *target]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # as on a machine without a GPU
    subprocess.run(command, check=True, env=environ, timeout=PATIENCE)
    compiled, loaded, later = start(str(tmp_path), str(tmp_path / "kernels"), tmp_path / "cache", kv_cache_dtype)
    record_property("kernels", loaded)
    assert compiled == 0 and later == 0 and loaded > 10
    assert not list((tmp_path / "cache").rglob("*.so"))  # nor did a C compiler run


@pytest.mark.gpu
def test_a_cold_start_compiles_in_the_background(tmp_path):
    """All kernels come from the other process; a second start finds them."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_0_6B))
    for _ in range(2):
        compiled, loaded, later = start(str(tmp_path), "", tmp_path / "cache")
        assert compiled == 0 and later == 0 and loaded > 10
