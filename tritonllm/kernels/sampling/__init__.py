"""From logits to a token: edits, truncation, the draw, log probabilities.

The names here are open to other wings: what a row of logits goes through before a draw, step by step, for kernels that
draw under conditions of their own (speculative/).
"""

from tritonllm.kernels.sampling.candidates import list_groups
from tritonllm.kernels.sampling.common import (
    GROUP,
    MIN_TEMPERATURE,
    UNIFORM_SUMS,
    argmax_token,
    clean_ref,
    draw_ref,
    first_max,
    keep,
    keep_ref,
    load_logits,
    load_scan,
    scale_of,
    scale_ref,
    scan,
    weight,
    weight_ref,
)
from tritonllm.kernels.sampling.draw import draw_of_group, group_score
from tritonllm.kernels.sampling.row_limits import find_row_limits
from tritonllm.kernels.sampling.sample import check_parameters, sample_rows
from tritonllm.kernels.sampling.truncation import limits_ref

__all__ = [
    "GROUP",
    "MIN_TEMPERATURE",
    "UNIFORM_SUMS",
    "argmax_token",
    "check_parameters",
    "clean_ref",
    "draw_of_group",
    "draw_ref",
    "find_row_limits",
    "first_max",
    "group_score",
    "keep",
    "keep_ref",
    "limits_ref",
    "list_groups",
    "load_logits",
    "load_scan",
    "sample_rows",
    "scale_of",
    "scale_ref",
    "scan",
    "weight",
    "weight_ref",
]
