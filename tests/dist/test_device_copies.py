"""Memory of a GPU that another process opens, and copies out of it and into it."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tritonllm.dist.device_copies import CudaDevice, load_cuda

pytestmark = pytest.mark.gpu
ROWS, SIZE = 64, 1 << 20
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def own(index, pipe):
    """Owns memory with the number of each row in it, until it is told to end."""
    device = CudaDevice(index)
    address = device.allocate(ROWS * SIZE)
    rows = torch.arange(ROWS, dtype=torch.uint8, device=f"cuda:{index}")[:, None].repeat(1, SIZE)
    torch.cuda.synchronize(index)
    device.copy([(address, rows.data_ptr(), rows.nbytes)])()
    pipe.send((device.export(address), device.machine))
    pipe.recv()
    back = torch.zeros_like(rows)
    device.copy([(back.data_ptr(), address, back.nbytes)])()
    pipe.send(back[:, 0].tolist())
    device.free(address)


@pytest.fixture
def owner():
    """``owner(index)``: its pipe, the handle of its memory and its machine."""
    spawn, processes = multiprocessing.get_context("spawn"), []

    def start(index):
        pipe, other = spawn.Pipe()
        processes.append(spawn.Process(target=own, args=(index, other), daemon=True))
        processes[-1].start()
        assert pipe.poll(200)
        return pipe, *pipe.recv(), processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("index", [0, pytest.param(1, marks=two_gpus)])
def test_memory_of_another_process(owner, index):
    pipe, handle, machine, _ = owner(index)
    device = load_cuda()(0)
    assert machine == device.machine
    address = device.open(handle)
    rows = torch.full((ROWS, SIZE), 255, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    base, order = rows.data_ptr(), torch.randperm(ROWS).tolist()
    device.copy([(base + to * SIZE, address + order[to] * SIZE, SIZE) for to in range(ROWS)])()
    assert rows[:, 0].tolist() == order and bool((rows == rows[:, :1]).all())
    thread = ThreadPoolExecutor(1)  # in which torch has done nothing
    thread.submit(lambda: device.copy([(address, base, ROWS * SIZE)])()).result(200)  # the other way
    thread.submit(device.close, address).result(200)
    pipe.send("end")
    assert pipe.poll(200) and pipe.recv() == order


def test_its_end_does_no_harm(owner):
    """What is open stays readable when its owner is killed: nobody's context is lost by that."""
    _, handle, _, process = owner(0)
    device = load_cuda()(0)
    address = device.open(handle)
    process.kill()
    process.join()
    rows = torch.zeros(ROWS, SIZE, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    device.copy([(rows.data_ptr(), address, rows.nbytes)])()
    device.close(address)
    assert rows[:, 0].tolist() == list(range(ROWS))
    with pytest.raises(OSError, match="CUDA: cuIpcOpenMemHandle"):
        device.open(handle)


def test_what_cannot_be_opened():
    device = load_cuda()(0)
    address = device.allocate(1 << 20)
    for handle in (bytes(64), device.export(address)):  # none, and this process's own
        with pytest.raises(OSError, match="CUDA: cuIpcOpenMemHandle"):
            device.open(handle)
    device.free(address)
    with pytest.raises(OSError, match="CUDA: cuMemAlloc"):
        device.allocate(1 << 50)
    assert torch.ones(4, device="cuda:0").sum() == 4  # the context is well
