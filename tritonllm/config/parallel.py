"""Several processes that compute one model, as a configuration (docs/distributed.md)."""

from dataclasses import dataclass

from tritonllm.config.checks import at_least, is_a, one_of

MOST_BLOCK_TOKENS = 256  # that kernels take
EXECUTORS = ("uni", "mp", "external_launcher", "ray")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How many ranks there are, and who starts them.

    Args:
        tensor_parallel_size: how many ranks share the heads and intermediate columns of layers, one on each GPU.
        pipeline_parallel_size: how many stages there are, each with some of the layers and ``tensor_parallel_size``
            ranks. As many steps are in flight.
        enable_expert_parallel: ranks have whole experts, each equally many of them, instead of a part of each. With
            ``data_parallel_size`` and one rank for each engine, the engines share the experts.
        expert_placement: a file of ``tritonllm rebalance-experts``: which rank has which experts, with
            ``enable_expert_parallel``. ``None``: in their order, one of each.
        decode_context_parallel_size: how many of the ranks that share a key head hold the keys of different tokens, in
            the place of copies (docs/distributed.md). 1: each has all of them.
        data_parallel_size: how many engines there are with the whole model each, on GPUs of their own, among which
            requests are dealt out (:class:`~tritonllm.LLM`, :class:`~tritonllm.AsyncLLM` and ``tritonllm serve``).
        distributed_executor_backend: how ranks are started: ``uni`` runs in this process; ``mp`` spawns a process for
            each other rank; with ``external_launcher`` another program (torchrun) has started them; ``ray`` starts
            actors of Ray, on one machine or on several. ``None`` takes the first of them that can hold so many ranks.
        worker_timeout: how long a rank, or the host of one, may give no sign of life before the requests end with an
            error, in seconds.
        disable_custom_all_reduce: let NCCL sum up what ranks compute, also where their GPUs reach each other's memory.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    enable_expert_parallel: bool = False
    expert_placement: str | None = None
    decode_context_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    worker_timeout: float = 10.0
    disable_custom_all_reduce: bool = False

    def __post_init__(self) -> None:
        at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        at_least("decode_context_parallel_size", self.decode_context_parallel_size, 1)
        at_least("data_parallel_size", self.data_parallel_size, 1)
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            raise ValueError(
                f"decode_context_parallel_size={self.decode_context_parallel_size} must divide tensor_parallel_size="
                f"{self.tensor_parallel_size}: it takes no ranks of its own"
            )
        backend = self.distributed_executor_backend
        if backend is not None:
            one_of("distributed_executor_backend", backend, EXECUTORS)
        if backend == "uni" and self.world_size > 1:
            raise ValueError(
                f"distributed_executor_backend='uni' is one process, but {self.sizes}: leave it out, or take 'mp'"
            )
        if backend == "external_launcher" and self.data_parallel_size > 1:
            raise ValueError(
                "distributed_executor_backend='external_launcher' has its processes already: leave out "
                f"data_parallel_size={self.data_parallel_size}, and launch so many jobs"
            )
        if backend == "ray" and self.data_parallel_size > 1:
            raise ValueError(
                f"distributed_executor_backend='ray' places the ranks of one engine: leave out data_parallel_size="
                f"{self.data_parallel_size}, and start so many servers"
            )
        is_a("enable_expert_parallel", self.enable_expert_parallel, bool)
        if self.expert_placement is not None:
            is_a("expert_placement", self.expert_placement, str)
            if not self.enable_expert_parallel or self.tensor_parallel_size == 1:
                raise ValueError(
                    "expert_placement places whole experts on ranks: give enable_expert_parallel and a "
                    "tensor_parallel_size above 1 with it, or leave it out"
                )
        is_a("disable_custom_all_reduce", self.disable_custom_all_reduce, bool)
        seconds = self.worker_timeout
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
            raise ValueError(f"worker_timeout must be a number of seconds greater than 0, got {seconds!r}")

    @property
    def world_size(self) -> int:
        """Ranks of an engine: rank ``stage * tensor_parallel_size + i`` is the i-th of its stage."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def shares_experts(self) -> bool:
        """Whether each engine has some of the experts, and all of the rest."""
        return self.enable_expert_parallel and self.data_parallel_size > 1 and self.world_size == 1

    @property
    def sizes(self) -> str:
        """What makes the ranks so many, for a message."""
        sizes = ((name, getattr(self, name)) for name in ("tensor_parallel_size", "pipeline_parallel_size"))
        return " times ".join(f"{name}={size}" for name, size in sizes if size > 1) or "tensor_parallel_size=1"

    @property
    def is_local(self) -> bool:
        """All ranks are on this machine."""
        return self.distributed_executor_backend not in ("external_launcher", "ray")

    def check_block(self, block_size: int) -> None:
        """Check that a block has not too many tokens for the kernels.

        Raises:
            ValueError: a block has too many tokens, over all ranks that have some of its keys.
        """
        size = self.decode_context_parallel_size
        if size * block_size > MOST_BLOCK_TOKENS:
            raise ValueError(
                f"decode_context_parallel_size={size} times block_size={block_size} are {size * block_size} tokens of "
                f"a block, and there can be {MOST_BLOCK_TOKENS}: lower one of them"
            )

    def check_device(self, device: str) -> None:
        """Check that the device leaves room for as many ranks and engines as there are.

        Raises:
            ValueError: it is one device, and there are several ranks or engines.
        """
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) > 1 and device not in ("auto", "cpu", "cuda"):
                raise ValueError(
                    f"device={device!r} is one device, but {name}={getattr(self, name)}: they take cuda:0, cuda:1 and "
                    "so on; choose among GPUs with CUDA_VISIBLE_DEVICES"
                )
