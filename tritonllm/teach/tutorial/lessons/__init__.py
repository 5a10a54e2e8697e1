"""The lessons, in their order. Importing this imports none of them, and no torch."""

from tritonllm.teach.tutorial.lesson import Lesson

LESSONS = (
    Lesson(
        *(1, "attention", "Attention and its cache", 6),
        "Vaswani et al., Attention Is All You Need (2017); Ainslie et al., GQA (2023)",
    ),
    Lesson(
        *(2, "paging", "Paging and copy-on-write", 7),
        "Kwon et al., Efficient Memory Management for LLM Serving with PagedAttention (2023)",
        has_exercise=True,
    ),
    Lesson(
        *(3, "batching", "Continuous batching", 5),
        "Yu et al., Orca: A Distributed Serving System for Transformer-Based Generative Models (2022)",
    ),
    Lesson(
        *(4, "prefix", "The prefix cache", 6),
        "Kwon et al., PagedAttention (2023); Zheng et al., SGLang and RadixAttention (2024)",
    ),
    Lesson(
        *(5, "chunks", "Chunked prefill", 5),
        "Agrawal et al., Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve (2024)",
    ),
    Lesson(
        *(6, "sampling", "Sampling", 7),
        "Holtzman et al., The Curious Case of Neural Text Degeneration (2020)",
        has_exercise=True,
    ),
    Lesson(
        *(7, "speculation", "Speculation", 8),
        "Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023)",
        has_exercise=True,
    ),
    Lesson(
        *(8, "quantization", "Quantization", 7),
        "Dettmers et al., LLM.int8() (2022); Micikevicius et al., FP8 Formats for Deep Learning (2022)",
    ),
    Lesson(
        *(9, "kernel", "A first Triton kernel", 8),
        "Tillet et al., Triton (2019); Dao et al., FlashAttention (2022)",
        has_exercise=True,
        interpreted=True,
    ),
    Lesson(
        *(10, "parallel", "Tensor parallelism in two processes", 6),
        "Shoeybi et al., Megatron-LM (2019)",
    ),
)


def find(number: int) -> Lesson:
    """The lesson with this number.

    Raises:
        ValueError: there is no such lesson.
    """
    if not 1 <= number <= len(LESSONS):
        raise ValueError(f"lesson {number} does not exist: there are 1 to {len(LESSONS)}; --list shows them")
    return LESSONS[number - 1]
