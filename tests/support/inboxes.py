"""Inboxes of ranks that are all in this process, and their memory for an exchange of rows."""

import torch

from tritonllm.kernels.collective import ExchangeLayout, ExchangeMemory, InboxLayout, PeerInbox, exchange_memory


class LocalInbox(PeerInbox):
    """Keeps the memory that its links lead to."""


def local_inboxes(layout: InboxLayout, device: torch.device, *, stopped: bool = False) -> list[PeerInbox]:
    """One for each rank; with ``stopped``, nobody waits for anything."""
    elements = layout.nbytes // layout.dtype.itemsize
    memory = [torch.full((elements,), -0.0, dtype=layout.dtype, device=device) for _ in range(layout.size)]
    stop = torch.full((1,), int(stopped), dtype=torch.int32, device=device)
    links = torch.tensor([t.data_ptr() for t in (*memory, stop)], device=device)
    found = []
    for rank in range(layout.size):
        inbox = LocalInbox(layout, rank, links, torch.zeros(layout.programs, dtype=torch.int32, device=device))
        inbox.memory = memory, stop
        found.append(inbox)
    return found


class LocalMemory(ExchangeMemory):
    """Keeps the memory that its links lead to."""


def local_memories(layout: ExchangeLayout, device: torch.device, *, stopped: bool = False) -> list[ExchangeMemory]:
    """One for each rank, full of NaN and of ids that are out of range but for the flags; with ``stopped``, nobody waits
    for anything."""
    memory = [torch.full((layout.nbytes,), 255, dtype=torch.uint8, device=device) for _ in range(layout.size)]
    for own in memory:
        own[layout.flags_at :] = 0
        own[layout.ids_at : layout.parts_at] = 127
    stop = torch.full((1,), int(stopped), dtype=torch.int32, device=device)
    links = torch.tensor([t.data_ptr() for t in (*memory, stop)], device=device)
    found = []
    for rank, own in enumerate(memory):
        local = LocalMemory(*exchange_memory(layout, rank, own, links))
        local.memory = memory, stop
        found.append(local)
    return found
