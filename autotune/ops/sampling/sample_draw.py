"""Sampling's pass over the logits: how much of a row a program takes."""

from autotune.ops import Tunable, product
from autotune.ops.sampling.sample import MODES, Sampling
from autotune.ops.speculative.rejection_judge import RejectionSampling
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.sampling import draw


def space(rows: int, vocab: int) -> list[tuning.Config]:
    return product(TILES=(1, 2, 3, 4, 5, 6, 8), num_warps=(1, 2, 4, 8))


TUNABLE = Tunable(
    op="sample_draw",
    module=draw,
    default=draw.default_config,
    # Vocabularies of Qwen3 and Llama 3; and 320 rows of a speculative step
    problems=(
        *(Sampling(rows, MODES[:1], vocab) for vocab in (151936, 128256) for rows in (1, 4, 16, 64, 256)),
        RejectionSampling(64, 4, "greedy"),
    ),
    space=space,
)
