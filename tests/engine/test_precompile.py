"""What an engine will launch, found without a GPU; and the process that compiles it while the engine starts."""

import time
import warnings
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from support.encoders import encoder_config
from support.mechanism_configs import MECHANISMS
from support.specializations import described
from support.tiny_models import ALL_FAMILIES, tiny_config
from support.waiting import eventually
from triton import knobs
from triton.runtime import driver
from triton.runtime.cache import triton_key

from tritonllm.config.engine import EngineConfig
from tritonllm.dist.exchange import Exchange
from tritonllm.dist.group import Group
from tritonllm.dist.lockstep import Board, Lockstep
from tritonllm.dist.pipeline import Team
from tritonllm.engine.start import precompile
from tritonllm.engine.start.precompile import (
    META,
    NUM_BLOCKS,
    BackgroundCompiler,
    Target,
    compile_kernels_of,
    kernels_of,
)
from tritonllm.engine.step.runner import ModelRunner
from tritonllm.kernels.compile.aot import pretend, target_of
from tritonllm.kernels.compile.parallel import Specialization, list_kernels
from tritonllm.kernels.runtime import tuning
from tritonllm.layers.metadata import KVScales
from tritonllm.models.decoder import Decoder
from tritonllm.models.expert_checks import dealt_out
from tritonllm.models.families import spec_from_config

NEEDED = "_advance_seats_kernel"
TARGET = Target(arch=90, name=None, dtype=torch.bfloat16, max_model_len=64)


def config(**settings):
    return EngineConfig.from_kwargs(model="tiny", **{"max_num_seqs": 4, "max_num_batched_tokens": 16, **settings})


def names(family, target=TARGET, **settings):
    return {kernel.name for kernel in kernels_of(spec_from_config(tiny_config(family)), config(**settings), target)}


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_lists_the_kernels_of_every_family(family):
    assert {"_prefill_kernel", "_advance_seats_kernel"} < names(family)
    assert driver._active is None or driver._active.get_current_target().arch != 90  # as before


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_lists_the_kernels_of_encoders(family):
    """A window to both sides is the portable kernel's on Hopper, too."""
    name = {"bert": "BertModel", "modernbert": "ModernBertModel"}[family]
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2, "architectures": [name]}
    spec = spec_from_config(encoder_config(family, **sizes))
    target = TARGET._replace(max_model_len=512)
    found = kernels_of(spec, config(max_num_batched_tokens=512, max_model_len=512), target)
    assert "_prefill_sm90_kernel" in {kernel.name for kernel in found}


def test_lists_what_the_target_and_the_configuration_ask_for():
    spec = spec_from_config(tiny_config("qwen3", head_dim=64, num_attention_heads=8))
    hopper, ampere = (
        {kernel.name for kernel in kernels_of(spec, config(max_num_batched_tokens=512), TARGET._replace(arch=arch))}
        for arch in (90, 80)
    )
    assert "_prefill_sm90_kernel" in hopper - ampere
    small, large = (len(kernels_of(spec, config(max_num_batched_tokens=n), TARGET)) for n in (4, 4096))
    assert small < large


@pytest.mark.parametrize("transfer", [None, {"kv_connector": "CudaIpc"}])
def test_lists_copies_to_the_host_if_there_are_any(transfer):
    """One kernel for each direction, whatever the number of layers; and no memory is taken, neither the host's nor that
    of a GPU, for a connector between these."""
    spec = spec_from_config(tiny_config("qwen3"))
    found = kernels_of(spec, config(kv_offloading_size=1e6, kv_transfer_config=transfer), TARGET)
    assert [kernel.name for kernel in found].count("_pack_blocks_kernel") == 2
    assert "_pack_blocks_kernel" not in names("qwen3")


def test_scales_of_a_narrow_cache_need_no_other_kernels(monkeypatch):
    """They are in the files of the weights, which nobody reads before kernels are compiled."""
    spec, narrow = spec_from_config(tiny_config("qwen3")), config(kv_cache_dtype="fp8")
    unscaled = {described(kernel) for kernel in kernels_of(spec, narrow, TARGET)}
    monkeypatch.setattr(Decoder, "kv_scales", property(lambda model: [KVScales(0.3, 0.01)] * model.spec.num_layers))
    assert {described(kernel) for kernel in kernels_of(spec, narrow, TARGET)} == unscaled
    assert unscaled != {described(kernel) for kernel in kernels_of(spec, config(), TARGET)}


def test_lists_the_count_of_experts_if_they_are_counted():
    """Of all tokens and, in the last layer, of the wanted rows; for every other kernel the same."""
    for options in ({}, {"enable_expert_parallel": True, "tensor_parallel_size": 2}):
        plain, counted = names("qwen3_moe", **options), names("qwen3_moe", **options, count_expert_load=True)
        assert counted - plain >= {"_count_experts_kernel"}
        assert plain <= counted


@pytest.mark.parametrize(
    ("budget", "seats", "kernels"),
    [(1000, 4, 0), (1024, 4, 1), (1500, 4, 1), (4096, 4, 1), (1000, 800, 1)],
)
def test_the_gate_of_many_rows(budget, seats, kernels):
    """One kernel for all larger steps than of 1024 tokens, if there are: captured ones have room for every seat."""
    spec = spec_from_config(tiny_config("qwen3", hidden_size=64, intermediate_size=128))
    found = kernels_of(spec, config(max_num_batched_tokens=budget, max_num_seqs=seats), TARGET)
    assert [kernel.name for kernel in found].count("linear_gated_sm90_kernel") == kernels


def test_the_tables_of_the_named_gpu_hold(monkeypatch):
    looked_up = []

    def table(slug, op):
        looked_up.append(slug)

    monkeypatch.setattr(tuning, "load_table", table)
    tuning._lookup.cache_clear()
    for name in (None, "NVIDIA X1"):
        names("llama", TARGET._replace(name=name))
    assert set(looked_up) == {"nvidia_x1"}
    tuning._lookup.cache_clear()


def test_distinct_layers_keep_the_first_and_each_kind():
    spec = spec_from_config(tiny_config("gemma2", num_hidden_layers=6))  # every second layer has a window
    assert spec.distinct_layers() == [0, 1, 2]
    same = spec_from_config(tiny_config("llama", num_hidden_layers=6))
    assert same.distinct_layers() == [0, 1]


@pytest.fixture
def one_kernel(tmp_path, monkeypatch):
    """An empty cache, and models that need one kernel only."""
    monkeypatch.setattr(precompile, "kernels_of", lambda *args: [k for k in kernels_of(*args) if k.name == NEEDED])
    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        yield tmp_path


def cubins(folder: Path) -> int:
    return len(list(folder.rglob("*.cubin")))


def test_compiles_into_the_cache(one_kernel):
    spec = spec_from_config(tiny_config("qwen3"))
    assert compile_kernels_of(spec, config(), TARGET) == (1, 1)
    assert cubins(one_kernel) == 1
    assert compile_kernels_of(spec, config(), TARGET, jobs=1) == (1, 0)


def test_compiles_in_the_background(one_kernel):
    with BackgroundCompiler(spec_from_config(tiny_config("qwen3")), config()) as compiler:
        compiler.begin(TARGET)
    assert cubins(one_kernel) == 1  # leaving the block waited


def test_triton_is_hashed_meanwhile():
    triton_key.cache_clear()
    with BackgroundCompiler(spec_from_config(tiny_config("qwen3")), config()):
        pass
    assert triton_key.cache_info().currsize == 1


def test_the_background_process_ends_if_nothing_is_asked_of_it(one_kernel, monkeypatch):
    waits, join = [], BaseProcess.join
    monkeypatch.setattr(BaseProcess, "join", lambda self, timeout=None: (waits.append(timeout), join(self, timeout))[1])
    with pytest.raises(ZeroDivisionError), BackgroundCompiler(spec_from_config(tiny_config("qwen3")), config()) as it:
        raise ZeroDivisionError
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with BackgroundCompiler(spec_from_config(tiny_config("qwen3")), config()) as other:
            pass
    assert not it._process.is_alive() and not other._process.is_alive()
    assert precompile.LONGEST_WAIT not in waits


def test_its_workers_end_with_it(one_kernel, monkeypatch):
    """A start that fails while kernels are being compiled leaves no process behind."""
    monkeypatch.setattr(Specialization, "compile", lambda self: time.sleep(precompile.LONGEST_WAIT))
    with pytest.raises(ZeroDivisionError), BackgroundCompiler(spec_from_config(tiny_config("qwen3")), config()) as it:
        it.begin(TARGET)
        eventually(lambda: processes_of(it))
        raise ZeroDivisionError
    eventually(lambda: not processes_of(it))


def processes_of(compiler):
    """Numbers of the processes in its group, itself left out."""
    group, found = compiler._process.pid, []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group != int(stat.parent.name) and state != "Z":
                found.append(int(stat.parent.name))
    return found


def test_a_failure_in_the_background_is_told_and_harmless(one_kernel, monkeypatch, capfd):
    monkeypatch.setattr(precompile, "compile_kernels_of", lambda *args: 1 / 0)
    spec = spec_from_config(tiny_config("qwen3"))
    with pytest.warns(UserWarning, match="one by one"), BackgroundCompiler(spec, config()) as compiler:
        compiler.begin(TARGET)
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_lists_the_kernels_of_ranks(family):
    """A rank has none that adds in its product or in its sum of experts: what it computes is a part of a sum."""
    spec = spec_from_config(tiny_config(family))
    alone, ranks = (kernels_of(spec, config(tensor_parallel_size=size), TARGET) for size in (1, 2))
    assert {"_prefill_kernel", NEEDED} < {kernel.name for kernel in ranks}
    assert {described(kernel) for kernel in ranks} != {described(kernel) for kernel in alone}


@pytest.mark.parametrize("eager", [True, False])
def test_stages_start_where_a_step_has_no_more_tokens_than_sequences(eager):
    """The start then has steps of one token more, and what comes from the stage before needs room for it."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 4, "enforce_eager": eager, "pipeline_parallel_size": 2}
    assert kernels_of(spec_from_config(tiny_config("qwen3")), config(**sizes), TARGET)


@pytest.mark.parametrize("first", ["sliding_attention", pytest.param("full_attention", marks=pytest.mark.long)])
def test_lists_the_kernels_of_stages_whose_layers_share_keys(first):
    """Also where the first layer of all is one that another reads."""
    kinds = [first, "full_attention" if first == "sliding_attention" else "sliding_attention"]
    spec = spec_from_config(tiny_config("gemma4_text", layer_types=[*kinds, "sliding_attention", "full_attention"]))
    assert {"_prefill_kernel", NEEDED} < {k.name for k in kernels_of(spec, config(pipeline_parallel_size=2), TARGET)}


def test_lists_the_kernels_of_split_keys():
    """Each rank attends to its part, and merges what it gets of its heads."""
    spec = spec_from_config(tiny_config("llama", num_key_value_heads=1))
    split = config(tensor_parallel_size=2, decode_context_parallel_size=2)
    copies, parts = ({kernel.name for kernel in kernels_of(spec, c, TARGET)} for c in (config(), split))
    assert "_merge_states_kernel" in parts - copies


def test_lists_both_ways_in_which_ranks_find_limits():
    """In each other's memory, and where they do not reach that, in what one of them has gathered."""
    spec = spec_from_config(tiny_config("qwen3", vocab_size=512))
    found = kernels_of(spec, config(tensor_parallel_size=2), TARGET)
    steps = [k.source.signature["rank_steps_ptr"] for k in found if k.name == "_limited_kernel"]
    assert sorted(steps) == ["*i64"] * 2 + ["constexpr"] * 2


def test_too_many_ranks_are_refused():
    with pytest.raises(ValueError, match="tensor_parallel_size=8 must divide the number of attention heads"):
        kernels_of(spec_from_config(tiny_config("llama")), config(tensor_parallel_size=8), TARGET)


@pytest.mark.parametrize(("model", "size"), [("qwen3-30b", 2), ("gpt-oss", 4)])
def test_lists_the_kernels_of_engines_that_share_experts(model, size):
    """All of them, and no others: each has its part of the experts, through which the rows of all engines go, and none
    looks for prefixes that sequences share."""
    spec = spec_from_config(next(made for name, made in MECHANISMS.items() if name.startswith(model)))
    limits, length = {"max_num_seqs": 64, "max_num_batched_tokens": 512}, 6144
    target, shared = TARGET._replace(max_model_len=length), {"data_parallel_size": size, "enable_expert_parallel": True}
    alone, shared = (config(**limits, max_model_len=length, **more) for more in ({}, shared))
    listed, others = ({described(kernel) for kernel in kernels_of(spec, c, target)} for c in (shared, alone))
    assert listed != others
    exchange = Exchange(Group(size - 1, size))
    sizes = {"dtype": TARGET.dtype, "device": META, "max_model_len": length}
    with pretend(target_of(TARGET.arch)), list_kernels(TARGET.name) as found, torch.inference_mode():
        model = Decoder(dealt_out(spec, shared.parallel), **sizes, exchange=exchange)  # of all layers
        lockstep = Lockstep(Board(size), size - 1, patience=1)
        runner = ModelRunner(model, shared, META, length, team=Team(exchange=exchange, lockstep=lockstep))
        runner.start(NUM_BLOCKS, length)
        with model.rehearsal():
            runner.warm_up().run()
    assert {described(kernel) for kernel in found} == listed
