import pytest
import torch
from support.aot import assert_resources, assert_uniform_sums, compile_kernels, each_arch

from tritonllm.kernels import rejection_sample, rejection_sample_tree


def arguments(batch, drafts, vocab, dtype, *, with_probs, limits=True):
    number = torch.empty(batch, dtype=torch.int64)
    of_all = (torch.empty(batch, dtype=torch.int32), torch.empty(batch)) if limits else (None, None)
    probs = torch.empty(batch, drafts, vocab) if with_probs else None
    logits = torch.empty(batch, drafts + 1, vocab, dtype=dtype)
    return torch.empty(batch, drafts, dtype=torch.int32), probs, logits, torch.empty(batch), *of_all, number, number


def tree_arguments(batch, drafts, vocab, dtype, **options):
    ids, _, *rest = arguments(batch, drafts, vocab, dtype, with_probs=False, **options)
    return ids, ids, *rest


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        rejection_sample(*arguments(4, 4, 151936, torch.bfloat16, with_probs=True))
        rejection_sample(*arguments(4, 4, 128256, torch.float32, with_probs=True, limits=False))
        rejection_sample(*arguments(4, 16, 50257, torch.float32, with_probs=False, limits=False))
        rejection_sample_tree(*tree_arguments(4, 60, 151936, torch.bfloat16))
        rejection_sample_tree(*tree_arguments(4, 5, 128256, torch.float32, limits=False))
    assert_resources(kernels)


@pytest.mark.parametrize(
    "vocab", [200, pytest.param(700, marks=pytest.mark.long), pytest.param(2048, marks=pytest.mark.long)]
)
def test_branches_are_taken_by_all_threads(vocab):
    """See `test_sampling`."""
    with compile_kernels(90, every=1) as kernels:
        rejection_sample(*arguments(4, 3, vocab, torch.float32, with_probs=True))
        rejection_sample(*arguments(4, 3, vocab, torch.float32, with_probs=True, limits=False))
    assert_uniform_sums(kernels, {"_judge_kernel", "_row_limits_kernel"})


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        *((256, torch.float32), (32768, torch.bfloat16)),
        *(
            pytest.param(vocab, dtype, marks=pytest.mark.long)
            for vocab, dtype in (
                *((512, torch.bfloat16), (1024, torch.float16)),
                *((8192, torch.float32), (16384, torch.float16)),
            )
        ),
    ],
)
def test_sizes_of_few_groups_and_few_runs_compile(vocab, dtype):
    """Triton 3.6 fails in a scan over fewer columns than a thread has."""
    with compile_kernels(90, every=1) as kernels:
        rejection_sample(*arguments(4, 3, vocab, dtype, with_probs=True))
    assert {kernel.name for kernel in kernels} >= {"_judge_kernel", "_chain_kernel"}


@pytest.mark.long
def test_smallest_sizes_compile():
    """Sizes of 1 become constants in Triton."""
    with compile_kernels(90, every=1) as kernels:
        rejection_sample(*arguments(1, 1, 1, torch.float32, with_probs=True))
        rejection_sample(*arguments(1, 0, 1, torch.float32, with_probs=False))
        rejection_sample_tree(*tree_arguments(1, 1, 1, torch.float32))
        rejection_sample_tree(*tree_arguments(1, 0, 1, torch.float32))
    assert_resources(kernels)
