"""Flags by which programs of several GPUs wait for each other.

A program, number p of a launch, waits for the programs of that number on the other ranks. Each of them has a flag for
it in this rank's memory, which counts that program's launches: the number is its *epoch*. Before it sets a flag all
threads of a program meet, and one releases at the scope of the whole system; who waits acquires. So what those programs
have written before is visible behind.
"""

import triton
import triton.language as tl

from tritonllm.kernels.collective.all_reduce import LOOK


@triton.jit
def signal(links_ptr, rank, flags_at, programs, epoch, PHASE: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Show the other ranks what all threads of this program have written or seen, and tell them.

    Each flag has a thread of its own.
    """
    lane = tl.arange(0, LANES)
    m_other = (lane < SIZE) & (lane != rank)
    place = (PHASE * programs + tl.program_id(0)) * SIZE + rank
    address = tl.load(links_ptr + lane, mask=m_other, other=0) + flags_at + 4 * place
    tl.debug_barrier()
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int32)), epoch, mask=m_other, sem="release", scope="sys")


@triton.jit
def wait_for_others(
    links_ptr, rank, flags_at, programs, epoch, PHASE: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr
):
    """Wait for the programs of this number on the other ranks; what they have shown is there for all threads then.

    There are as many lanes as threads. So every look is one thread's, and all threads learn the same of it: their
    maximum passes between warps.
    """
    lane = tl.arange(0, LANES)
    m_other = (lane < SIZE) & (lane != rank)
    stop_ptr = tl.load(links_ptr + SIZE).to(tl.pointer_type(tl.int32))
    address = tl.load(links_ptr + rank) + flags_at + 4 * ((PHASE * programs + tl.program_id(0)) * SIZE)
    p_flag = address.to(tl.pointer_type(tl.int32)) + lane
    missing = 1
    tries = 0
    while missing != 0:
        b_seen = tl.atomic_add(p_flag, 0, mask=m_other, sem="acquire", scope="sys")  # a load that acquires
        missing = tl.max((m_other & (b_seen - epoch < 0)).to(tl.int32), axis=0)  # also where epochs wrap around
        tries += 1
        if tries % LOOK == 0:  # one thread
            b_stop = tl.load(stop_ptr + tl.zeros_like(lane), mask=lane == 0, other=0, volatile=True)
            missing = tl.where(tl.max(b_stop, axis=0) != 0, 0, missing)
    tl.debug_barrier()
