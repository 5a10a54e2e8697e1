"""Memory of a GPU that other processes of the host open, and copies there from GPU to GPU, beside what torch does.

The driver is called directly, as in :mod:`tritonllm.dist.peer_memory`. Copies run on streams of their own, by the
copy engines where these reach the other GPU (NVLink, or PCIe with peer access).
"""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from tritonllm.dist.peer_memory import CudaDriver, number_of

STREAMS = 4  # copies that run at once; each is in order with those of its stream only


class CudaDevice:
    """The memory of one GPU: a :class:`tritonllm.engine.transfer.ipc_memory.Device`.

    Args:
        index: the index of the GPU, for torch.

    Raises:
        OSError: there is no driver.
    """

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._driver = CudaDriver(self._device)
        self.machine = number_of(())
        with told_as_os_error():
            streams = [torch.cuda.Stream(self._device) for _ in range(STREAMS)]
        self._lock = threading.Lock()
        self._streams = itertools.cycle(streams)

    def allocate(self, nbytes: int) -> int:
        with told_as_os_error(), self._driver.current():
            return self._driver.allocate(nbytes, 0)

    def free(self, address: int) -> None:
        with told_as_os_error(), self._driver.current():
            self._driver.give_back(address, ())

    def export(self, address: int) -> bytes:
        with told_as_os_error(), self._driver.current():
            return self._driver.export(address)

    def open(self, handle: bytes) -> int:
        with told_as_os_error(), self._driver.current():
            return self._driver.open(handle)

    def extent(self, address: int) -> int | None:
        with told_as_os_error(), self._driver.current():
            return self._driver.extent(address)

    def close(self, address: int) -> None:
        with told_as_os_error(), self._driver.current():
            self._driver.give_back(None, [address])

    def copy(self, spans: Sequence[tuple[int, int, int]]) -> Callable[[], None]:
        with self._lock:
            stream = next(self._streams)
        with told_as_os_error(), self._driver.current():
            try:
                self._driver.copy(spans, stream.cuda_stream)
                ended = torch.cuda.Event(blocking=True)  # who waits sleeps: steps are launched meanwhile
                ended.record(stream)
            except RuntimeError:
                stream.synchronize()  # those before the one that was refused run still
                raise

        def wait() -> None:
            with told_as_os_error():
                ended.synchronize()

        return wait


@contextmanager
def told_as_os_error() -> Iterator[None]:
    """Errors of driver and torch as what connectors take for a failure."""
    try:
        yield
    except RuntimeError as error:  # DriverError is one, too
        raise OSError(f"CUDA: {(str(error).splitlines() or [type(error).__name__])[0]}") from error


def load_cuda() -> Callable[[int | None], CudaDevice]:
    """What makes the device of a GPU by its number.

    Raises:
        ValueError: there is no GPU here; or the engine runs on the CPU, when it is called.
    """
    need = "kv_transfer_config: kv_connector='CudaIpc' needs a CUDA device, and "
    if not torch.cuda.device_count():  # asks NVML: CUDA must not begin before the compiler's process is forked
        raise ValueError(need + "there is none here: take 'Peer'")

    def make(index: int | None) -> CudaDevice:
        if index is None:
            raise ValueError(need + "this engine runs on the CPU: take 'Peer', or device='cuda'")
        return CudaDevice(index)

    return make
