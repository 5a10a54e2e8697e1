"""The ranks that share a model, and what they do together: one small value that is passed to whoever needs it.

A :class:`Group` of one rank is the default everywhere, and its collectives return what they are given. Those of
:class:`ConnectedGroup` are torch.distributed's (NCCL between GPUs, gloo on the CPU). It is made from a process group of
its own, never from torch's default one, so two engines in a process do not know of each other.

All ranks must get the same sums, bit for bit: each of them decides from them what it computes next (which experts,
say). NCCL and gloo add up each element in one place and send the sum to the others. Ranks whose GPUs reach each other's
memory have our own kernels for the sums of a decoder (:mod:`tritonllm.dist.symmetric`): all add in the order of the
ranks.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.nn import functional as F

if TYPE_CHECKING:  # kernels are imported where there is a GPU
    from tritonllm.dist.shared_rows import SharedRows
    from tritonllm.kernels.collective import AddedNorm


PATIENCE = 10.0  # seconds that leaving a group may take
ABORT = "tritonllm-abort"  # the thread that leaves NCCL's


class Group:
    """One rank of a group whose collectives do nothing: of one rank, or of ranks that are not there.

    Args:
        rank: the number of this rank, from 0 to ``size - 1``.
        size: number of ranks. More than one without connections is for meta tensors, whose values nobody reads.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if size < 1 or not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to size - 1, got rank={rank} and size={size}")
        self.rank = rank
        self.size = size

    @property
    def leads(self) -> bool:
        """This is rank 0, which schedules, draws tokens and reports."""
        return self.rank == 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``x``, in its place and returned; the same bits everywhere."""
        return x

    def reserve(self, columns: int, dtype: torch.dtype) -> None:
        """Prepare for sums of ``[rows, columns]``; all ranks call it."""

    @property
    def fused_rows(self) -> int:
        """Up to how many rows, as they were reserved, :meth:`add_norm` takes; -1 if it takes none."""
        return -1

    def add_norm(self, part: torch.Tensor, added: "AddedNorm") -> torch.Tensor:
        """:meth:`all_reduce`, the addition to a residual stream and its RMS norm in one launch.

        Args:
            part: ``[rows, columns]``, overwritten with the norm.
            added: the stream, which gets the sum, and the norm.
        """
        raise NotImplementedError

    def share_rows(self, rows: int, columns: int) -> "SharedRows | None":
        """Memory for rows of logits that all ranks read; all ranks call it.

        Args:
            columns: the columns of each rank, a multiple of 128.

        Returns:
            This rank's part of the rows; ``None``, on all ranks, where they cannot read each other's memory. Ranks that
            are not there get meta tensors: they launch what ranks launch that can.
        """
        from tritonllm.dist.shared_rows import meta_rows

        return meta_rows(self.size, rows, columns) if self.size > 1 else None

    def all_gather(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        """``x[N, C]`` of every rank side by side -> ``[N, columns]``.

        Each rank brings C columns or, where ``columns`` are not enough for that, as many as are left. ``x`` has that
        number of columns.
        """
        if self.size == 1:
            return x
        return x.new_empty(x.shape[0], columns)

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, contiguous and of one shape everywhere, of every rank -> ``[size, *x.shape]``."""
        return x.new_empty(self.size, *x.shape) if self.size > 1 else x[None]

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """``x[size, ...]``, contiguous, of which row i goes to rank i -> a tensor of this shape, of which row i is from
        rank i."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``x``, in its place and returned."""
        return x

    def least(self, value: int) -> int:
        """The smallest of all ranks' values; waits for it."""
        return value

    def limit(self, seconds: float) -> None:
        """A collective on the CPU that takes longer breaks from here on. (On a GPU the host does not wait for it.)"""

    def shut(self) -> None:
        """Leave the group; idempotent, from several threads, too: each returns when it has been left.

        On the CPU, a collective that another thread has begun ends first (it breaks when the rank that it waits for
        ends), and what the group is asked later raises a :class:`RuntimeError`.
        """


ALONE = Group()


class ConnectedGroup(Group):
    """A rank that reaches the others.

    Args:
        backend: a process group of torch.distributed.
        device: the device of the tensors that will come.
    """

    def __init__(self, backend: Any, device: torch.device) -> None:
        super().__init__(backend.rank(), backend.size())
        self._backend = backend
        self._device = device
        self._is_shut = False
        self._leaving = threading.Lock()
        self._options = dist.AllreduceOptions(), AllgatherOptions(), dist.BroadcastOptions(), AllToAllOptions()
        for options in self._options:
            options.asyncOp = False  # NCCL then launches on the current stream, and no event is waited for

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        _wait(self._backend.allreduce([x], self._options[0]))
        return x

    def all_gather(self, x: torch.Tensor, columns: int) -> torch.Tensor:
        each = share_of(columns, self.size)
        mine = x.contiguous() if x.shape[1] == each else F.pad(x, (0, each - x.shape[1]))
        parts = enumerate(self.stack(mine))  # of few columns the last ranks have none
        return torch.cat([part[:, : max(0, columns - place * each)] for place, part in parts], 1)

    def share_rows(self, rows: int, columns: int) -> "SharedRows | None":
        return None

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        everything = x.new_empty(self.size, *x.shape)
        _wait(self._backend._allgather_base(everything.flatten(0, 1), x, self._options[1]))
        return everything

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(x)
        _wait(self._backend.alltoall_base(received, x, [], [], self._options[3]))
        return received

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        _wait(self._backend.broadcast([x], self._options[2]))
        return x

    def send(self, x: torch.Tensor, to: int) -> Any:
        """Send ``x``, contiguous, to a rank without waiting. Returns what can be waited for; ``x`` must not change or
        go before."""
        return self._backend.send([x], to, 0)

    def receive(self, x: torch.Tensor, source: int) -> None:
        """Fill ``x``, contiguous, with what a rank sends; a GPU's later work waits for it, and on the CPU the host."""
        _wait(self._backend.recv([x], source, 0))

    def introduce(self, sender: int, receiver: int) -> None:
        """The first message from one rank to another, which waits for both.

        NCCL connects them in it: the host of the sender then waits until the receiver's has called. In the middle of a
        step that would be for ever if the receiver waits for the sender elsewhere.
        """
        x = torch.zeros(1, dtype=torch.uint8, device=self._device)
        if self.rank == sender:
            _wait(self.send(x, receiver))
        else:
            self.receive(x, sender)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)

    def introduce_all(self) -> None:
        """Call :meth:`all_to_all` for the first time, which waits for all: NCCL connects each rank to each in it, as
        above."""
        x = self.all_to_all(torch.zeros(self.size, dtype=torch.uint8, device=self._device))
        if x.is_cuda:
            torch.cuda.synchronize(x.device)

    def least(self, value: int) -> int:
        return min(value for (value,) in self.exchange([value]))

    def exchange(self, words: Sequence[int]) -> list[list[int]]:
        """Each rank's 64-bit integers, as many from all; waits for them."""
        table = torch.zeros(self.size, len(words), dtype=torch.int64, device=self._device)
        table[self.rank] = torch.tensor(words, dtype=torch.int64, device=self._device)
        _wait(self._backend.allreduce([table], self._options[0]))
        return table.tolist()

    def limit(self, seconds: float) -> None:
        if self._device.type == "cpu":
            self._backend._set_default_timeout(timedelta(seconds=seconds))

    def shut(self) -> None:
        if self._device.type == "cuda":
            abort = getattr(self._backend, "abort", None)  # NCCL's: a collective that waits for a dead rank never ends
            if abort is not None and not self._is_shut:
                self._is_shut = True
                # It first tells what runs on the device to end, and then waits until no graph is left that has
                # captured a collective (NCCL 2.28, commDestroySync). So the runner's go first where ranks end as they
                # were told to; beside a rank that is gone they may run for ever.
                thread = threading.Thread(target=abort, name=ABORT, daemon=True)
                thread.start()
                thread.join(PATIENCE)
            return
        # gloo's threads end with it. One that still lets go of a tensor when Python has begun to end aborts the
        # process: 6 of 45 runs under torchrun on two busy cores ended with signal 6, behind their answer. So does the
        # thread that ends them, if Python ends meanwhile: whoever leaves a second time waits for the first.
        if self._leaving.acquire(timeout=PATIENCE):
            try:
                self._backend = _Left()
            finally:
                self._leaving.release()


def is_leaving() -> bool:
    """Whether a group of NCCL's has not been left in time and a thread of this process still waits for that."""
    return any(thread.name == ABORT for thread in threading.enumerate())


class _Left:
    """Stands in a group's place for the backend that it has left."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("this rank has left its group")


def _wait(work: Any) -> None:
    """gloo's work waits here; NCCL's, on the current stream, is none."""
    if work is not None:
        work.wait()


def share_of(count: int, size: int) -> int:
    """How many of ``count`` rows of a vocabulary every rank but the last ones has.

    A multiple of 128, so that each rank has whole groups of a draw (``kernels/sampling/shard.py``), or of 8, for
    aligned rows, where with 128 the last ones would have none.
    """
    for unit in (128, 8):
        each = -(-count // (unit * size)) * unit
        if each * (size - 1) < count:
            break
    return each
