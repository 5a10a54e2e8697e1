"""Inboxes of ranks that are all in this process."""

import torch

from tritonllm.kernels.collective import Inbox, Layout


class LocalInbox(Inbox):
    """Keeps the memory that its links lead to."""


def local_inboxes(layout: Layout, device: torch.device, *, stopped: bool = False) -> list[Inbox]:
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
