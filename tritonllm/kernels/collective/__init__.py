"""Operations in which several GPUs of one machine take part, over memory that they write to each other.

The names here are open to other wings and to :mod:`tritonllm.dist`.
"""

from tritonllm.kernels.collective.all_reduce import AddedNorm, all_reduce, all_reduce_ref, sum_rows
from tritonllm.kernels.collective.exchange import combine_rows, combine_rows_ref, dispatch_rows, dispatch_rows_ref
from tritonllm.kernels.collective.exchange_memory import (
    ExchangeLayout,
    ExchangeMemory,
    exchange_layout,
    exchange_memory,
)
from tritonllm.kernels.collective.inbox import InboxLayout, PeerInbox, layout_for

__all__ = [
    "AddedNorm",
    "ExchangeLayout",
    "ExchangeMemory",
    "InboxLayout",
    "PeerInbox",
    "all_reduce",
    "all_reduce_ref",
    "combine_rows",
    "combine_rows_ref",
    "dispatch_rows",
    "dispatch_rows_ref",
    "exchange_layout",
    "exchange_memory",
    "layout_for",
    "sum_rows",
]
