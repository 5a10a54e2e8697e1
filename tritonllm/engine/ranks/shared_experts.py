"""Engines that share the experts of one model (``data_parallel_size`` with ``enable_expert_parallel``).

Each engine is as any other: a process with a scheduler, a cache and all of the model but the experts, of which it has
its part. In each layer with experts they exchange rows (:mod:`tritonllm.dist.exchange`), so they take their steps
together (:mod:`tritonllm.dist.lockstep`).
"""

import multiprocessing.util
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from tritonllm.config.engine import EngineConfig
from tritonllm.dist.connect import connect
from tritonllm.dist.exchange import Exchange
from tritonllm.dist.group import ConnectedGroup, Group
from tritonllm.dist.lockstep import SPIN, ExpertPlace, Lockstep
from tritonllm.dist.pipeline import Team
from tritonllm.engine.cache.engine_memory import EngineMemory
from tritonllm.engine.ranks.worker import START_PATIENCE
from tritonllm.engine.start.ranks import Executor, Ranks, release_graphs
from tritonllm.engine.step.runner import ModelRunner

AT_THE_END = 100  # exit priority


class SharedExpertRanks(Ranks):
    """The other engines that share experts with this one, as its ranks. They have no part in its requests.

    Args:
        config: the configuration of the engine.
        place: the place of this engine among them.
    """

    def __init__(self, config: EngineConfig, place: ExpertPlace) -> None:
        self._config, self._place, self._met = config, place, Team()
        self._leading: list[weakref.ref[ModelRunner]] = []  # once all are ready
        self.device_index = place.rank

    def join(self, device: torch.device) -> Team:
        rank, port, board = self._place
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        group = connect(store, rank, board.size, device, timeout=START_PATIENCE, peers=False)
        exchange = Exchange(group)
        if device.type == "cuda" and not self._config.parallel.disable_custom_all_reduce:
            from tritonllm.dist.symmetric_exchange import SymmetricExchange  # with the kernels

            assert isinstance(group, ConnectedGroup)  # of several ranks
            exchange = SymmetricExchange(group, device)
        # at the end of any process, however it was begun: nobody waits on a device then
        multiprocessing.util.Finalize(None, _leave, args=(group, self._leading), exitpriority=AT_THE_END)
        spin = SPIN if device.type == "cuda" else 0.0  # without a GPU others need the cores
        lockstep = Lockstep(board, rank, self._config.step_timeout, spin)
        self._met = Team(exchange=exchange, lockstep=lockstep)
        return self._met

    def lead(self, runner: ModelRunner, memory: EngineMemory) -> Executor:
        self._met.least(0)  # all are ready: the first step waits for nobody's start
        self._met.exchange.group.limit(self._config.step_timeout)
        self._leading.append(weakref.ref(runner))
        return runner


def _leave(group: Group, leading: Sequence[weakref.ref[ModelRunner]]) -> None:
    release_graphs(leading)
    group.shut()
