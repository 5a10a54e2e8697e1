"""Compile an engine's kernels before it launches them: for another machine, or while this one loads the weights.

What an engine will launch is found by running its warm-up on meta tensors (:mod:`tritonllm.kernels.compile.parallel`),
with one layer of each kind. That takes a second and needs neither weights nor a GPU.
"""

import multiprocessing
import os
import signal
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from types import TracebackType
from typing import Any, NamedTuple

import torch
from triton.runtime.cache import triton_key

from tritonllm.config.engine import MADE, EngineConfig
from tritonllm.config.speculative import OF_HEADS
from tritonllm.dist.exchange import NO_EXCHANGE, Exchange
from tritonllm.dist.group import Group
from tritonllm.dist.pipeline import ALONE, Pipeline, Team
from tritonllm.engine.drafts.draft_model import make_head
from tritonllm.engine.step.preparation import rehearsal_of
from tritonllm.engine.step.runner import ModelRunner
from tritonllm.kernels.compile.aot import pretend, target_of
from tritonllm.kernels.compile.extensions import driver_extensions
from tritonllm.kernels.compile.parallel import Specialization, compile_in_parallel, list_kernels
from tritonllm.models.decoder import Decoder
from tritonllm.models.expert_checks import dealt_out
from tritonllm.models.quantization import quantize_layers
from tritonllm.models.spec import ModelSpec
from tritonllm.models.stages import Stage

META = torch.device("meta")
NUM_BLOCKS = 1 << 16  # of the cache; no kernel depends on it
LONGEST_WAIT = 180.0  # seconds for the background process; what it has compiled by then is kept


class Target(NamedTuple):
    """What kernels are compiled for.

    Attributes:
        arch: the architecture of an NVIDIA GPU: 90 for compute capability 9.0.
        name: the name of the GPU whose tuning tables hold, as ``"NVIDIA H200"``; ``None`` for built-in launch
            configurations.
        dtype: the dtype of weights and activations.
        max_model_len: the longest sequence that may come.
    """

    arch: int
    name: str | None
    dtype: torch.dtype
    max_model_len: int


def kernels_of(
    spec: ModelSpec, config: EngineConfig, target: Target, draft: ModelSpec | None = None
) -> list[Specialization]:
    """What an engine with this model and configuration launches. Nothing else may launch kernels meanwhile.

    Args:
        draft: the configuration's draft model.
    """
    parallel = config.parallel
    group, context = Group(0, parallel.tensor_parallel_size), Group(0, parallel.decode_context_parallel_size)
    exchange = Exchange(Group(0, parallel.data_parallel_size)) if parallel.shares_experts else NO_EXCHANGE
    spec = dealt_out(spec, parallel)
    with pretend(target_of(target.arch)), list_kernels(target.name) as found, torch.inference_mode():
        for stage in range(parallel.pipeline_parallel_size):
            team = Team(group, Pipeline(stage, parallel.pipeline_parallel_size), context, exchange)
            _launch_all(spec, config, target, draft if stage == 0 else None, team)
    return found


def _launch_all(spec: ModelSpec, config: EngineConfig, target: Target, draft: ModelSpec | None, team: Team) -> None:
    how = {"batch_invariant": config.deterministic, "counts_experts": config.count_expert_load}
    models: list[Decoder] = [_without_repeats(spec, target, team, **how)]
    if config.model.quantization in MADE:
        quantize_layers(models[0], config.model.quantization)
    if draft is not None and config.speculative_config is not None:
        if config.speculative_config.method in OF_HEADS:
            models.append(make_head(draft, models[0], bias=False, limit=target.max_model_len))
        else:
            models.append(_without_repeats(draft, target, ALONE))
    drafts = None if draft is None else models[1]
    runner = ModelRunner(models[0], config, META, target.max_model_len, draft=drafts, team=team)
    runner.start(NUM_BLOCKS, target.max_model_len)
    with rehearsal_of(models):  # as the engine warms up
        runner.warm_up().run()


def _without_repeats(spec: ModelSpec, target: Target, team: Team, **how: Any) -> Decoder:
    """A model with one layer of each kind, without memory."""
    small = spec.without_repeats()
    pipe, count = team.pipe, small.num_layers
    # the first layer of all, which may differ, is the first stage's, unless another reads its keys
    is_read = any(layer.keys_from == place > 0 for place, layer in enumerate(small.layers))
    begin = 0 if pipe.first or count == 1 or is_read else 1
    stage = Stage(pipe.stage, range(begin, count), first=pipe.first, last=pipe.last)
    sizes: dict[str, Any] = {"dtype": target.dtype, "device": META, "max_model_len": target.max_model_len}
    return Decoder(small, **sizes, group=team.group, context=team.context, exchange=team.exchange, stage=stage, **how)


def compile_kernels_of(
    spec: ModelSpec,
    config: EngineConfig,
    target: Target,
    draft: ModelSpec | None = None,
    *,
    jobs: int | None = None,
) -> tuple[int, int]:
    """Put them into Triton's cache; in a process as for :func:`kernels_of`.

    Args:
        draft: as in :func:`kernels_of`.
        jobs: processes; by default one a core.

    Returns:
        How many kernels there are, and how many were not there yet.
    """
    kernels = kernels_of(spec, config, target, draft)
    missing = [kernel for kernel in kernels if not kernel.is_cached()]
    compile_in_parallel([*missing, *driver_extensions()], jobs)
    return len(kernels), len(missing)


class BackgroundCompiler:
    """A process that fills Triton's cache while the engine starts. A context: leaving it waits until all is compiled.

    It is forked before CUDA is there, which it never touches, and told for what to compile once the device is known.
    If it fails, the engine compiles its kernels itself, one after the other.

    Before its first kernel a process hashes Triton's own files (``triton_key``): 400 MB, 0.33 s, without Python's lock.
    So both processes do that early, this one in a thread.
    """

    def __init__(self, spec: ModelSpec, config: EngineConfig, draft: ModelSpec | None = None) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, spec, config, draft), name="tritonllm-compiler")
        self._begun = False
        with warnings.catch_warnings():  # of a fork beside other threads: it takes none of their locks
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        self._hashing = Thread(target=triton_key, name="tritonllm-triton-key")
        self._hashing.start()  # after the fork, which would leave the process the locks that it holds

    def begin(self, target: Target) -> None:
        self._begun = True
        with suppress(BrokenPipeError):  # it has ended already: leaving says so
            self._pipe.send(target)

    def __enter__(self) -> "BackgroundCompiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._hashing.join()
        if self._begun and kind is None:
            self._process.join(LONGEST_WAIT)
            if self._process.exitcode != 0:
                warnings.warn("compiling kernels in parallel failed: they are compiled one by one", stacklevel=2)
        if self._process.is_alive() and self._process.pid is not None:
            self._process.kill()  # not SIGTERM, which LLVM handles, and may wait in for a lock that a fork has left
            with suppress(ProcessLookupError):  # it had no time to begin a group: then it has no workers
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, spec: ModelSpec, config: EngineConfig, draft: ModelSpec | None) -> None:
    os.setpgrp()  # so that its workers can be ended with it
    torch.set_num_threads(1)  # the parent's threads are not here
    triton_key()  # while the parent asks for the device
    compile_kernels_of(spec, config, pipe.recv(), draft)
