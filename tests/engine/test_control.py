"""What the host decides about next tokens, and requests whose thoughts have a budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engines import greedy, thinking_checkpoint, tiny_llm, token_ids

from tritonllm.engine.control import ThinkingBudget, thought_tokens

BEGIN, END = 1, 2


def bits(words):
    shifts = np.arange(32, dtype=np.uint32)
    return np.flatnonzero((words.view(np.uint32)[:, None] >> shifts & 1).ravel()).tolist()


@pytest.mark.parametrize(
    ("vocabulary", "found"),
    [
        ({"<think>": 7, "</think>": 8}, (7, 8)),
        ({"[THINK]": 7, "[/THINK]": 8, "a": 1}, (7, 8)),
        ({"<think>": 7}, None),
        ({}, None),
    ],
)
def test_tokens_of_a_family(vocabulary, found):
    assert thought_tokens(vocabulary) == found


@given(st.integers(0, 3), st.lists(st.integers(0, 4), max_size=12), st.integers(0, 12), st.sampled_from([END, 63]))
def test_a_thought_is_cut_at_its_budget(budget, tokens, split, end):
    """Whatever of it stands in the prompt; and a draw is held back whenever the token before could decide."""
    tokens = [end if token == END else token for token in tokens]
    control = ThinkingBudget(budget, BEGIN, end, tokens[:split], 70)
    for token in tokens[split:]:
        restricts, before = control.restricts(1), control.mask()
        control.take([token])
        if not restricts:  # so it did not matter which token came
            for other in (BEGIN, end, 9):
                probe = ThinkingBudget(budget, BEGIN, end, tokens[:split], 70)
                probe._thought = 0 if other == BEGIN else -1 if other == end else control._thought
                assert probe.mask() is None
        assert before is None or bits(before) == [end]
    begins = [i for i, token in enumerate(tokens) if token == BEGIN]
    thought = tokens[begins[-1] + 1 :] if begins else [end]
    forced = end not in thought and len(thought) >= budget
    assert (control.mask() is not None) == forced
    if forced:
        assert bits(control.mask()) == [end]


@pytest.fixture(scope="module", params=[False, True])
def llm(request):
    return tiny_llm(thinking_checkpoint(), async_scheduling=request.param)


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_thinking_token_budget(llm, budget):
    """A thought that the prompt begins, one that the output begins, one that ends in time; neighbours stay as alone."""
    prompts = [[9, BEGIN], [9, 8], [9, BEGIN], [9, 8], [7, BEGIN, 5]]
    params = [
        greedy(10, thinking_token_budget=budget, logit_bias={11: 100.0}),
        greedy(10, thinking_token_budget=budget, logit_bias={BEGIN: 100.0}),
        greedy(10, thinking_token_budget=budget, logit_bias={END: 100.0}),
        greedy(10, thinking_token_budget=budget),
        greedy(10),
    ]
    inside, begun, ended, none, free = token_ids(llm.generate(prompts, params, use_tqdm=False))
    assert inside == [11] * budget + [END] + [11] * (9 - budget)
    if budget == 0:
        assert begun == [BEGIN, END] * 5
    else:
        assert begun == [BEGIN] * 10  # each begins a thought anew
    assert ended == [END] * 10
    alone = token_ids([llm.generate([prompt], greedy(10), use_tqdm=False)[0] for prompt in prompts[3:]])
    assert [none, free] == alone


def test_a_preempted_thought_goes_on():
    roomy, tight = (tiny_llm(thinking_checkpoint(), num_blocks=blocks, async_scheduling=True) for blocks in (64, 14))
    params = greedy(24, thinking_token_budget=7, logit_bias={END: -100.0})
    prompts = [[BEGIN, 5, at] for at in range(9, 13)]
    expected = token_ids(roomy.generate(prompts, params, use_tqdm=False))
    assert token_ids(tight.generate(prompts, params, use_tqdm=False)) == expected
    assert tight.engine.stats.preemptions > 0
    assert all(tokens.index(END) == 5 for tokens in expected)  # two of the seven stand in the prompt


def test_a_tokenizer_without_thoughts_is_refused():
    with pytest.raises(ValueError, match=r"thinking_token_budget needs .*</think>"):
        tiny_llm().generate([[5]], greedy(1, thinking_token_budget=3), use_tqdm=False)
