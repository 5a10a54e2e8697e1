"""Texts of engines whose sums differ in their order: the same, but where two tokens are as likely."""

from support.engines import greedy
from tritonllm import LLM

Text = list[tuple[int, dict[int, float]]]  # tokens, each with log-probabilities of the most likely ones


def told(llm: LLM, prompts: list[list[int]], tokens: int = 40) -> list[Text]:
    """Greedy tokens, each with the log-probabilities of the two most likely ones."""
    outputs = llm.generate(prompts, greedy(tokens, logprobs=2), use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [
        [(token, {t: x.logprob for t, x in row.items()}) for token, row in zip(c.token_ids, c.logprobs, strict=True)]
        for c in completions
    ]


def check_equal(found: list[Text], want: list[Text], tie: float) -> None:
    """Where numbers are rounded, a sum in another order puts some of the next on the other side of a border: texts may
    part where two tokens are as likely, and before that log-probabilities are the same but for it."""
    parted = 0
    for text, expected in zip(found, want, strict=True):
        for (token, row), (other, other_row) in zip(text, expected, strict=True):
            if token != other:
                assert abs(row[token] - row.get(other, row[token] - 1)) < tie, (row, other_row)
                parted += 1
                break
            assert abs(row[token] - other_row[token]) < tie
    assert parted <= len(want) // 3
