"""Operations in which several GPUs of one machine take part, over memory that they write to each other.

The names here are open to other wings and to :mod:`tritonllm.dist`.
"""

from tritonllm.kernels.collective.all_reduce import AddedNorm, all_reduce, all_reduce_ref, sum_rows
from tritonllm.kernels.collective.inbox import Inbox, Layout, layout_for

__all__ = ["AddedNorm", "Inbox", "Layout", "all_reduce", "all_reduce_ref", "layout_for", "sum_rows"]
