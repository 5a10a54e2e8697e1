"""What the host decides about next tokens, and requests whose thoughts have a budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engines import greedy, thinking_checkpoint, tiny_llm, token_ids

from tritonllm.config.sampling_params import SamplingParams, StructuredOutputsParams
from tritonllm.engine.data.control import AfterThought, AtLeast, ThinkingBudget, mask_of, thought_tokens

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


class Allows:
    """A control that allows some tokens."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def restricts(self, pending):
        return False

    def take(self, tokens):
        return None

    def mask(self):
        words = np.zeros(3, dtype=np.int32)
        for token in self.tokens:
            words |= mask_of(token, 3)
        return words if self.tokens else None

    def forced(self):
        return self.tokens


@pytest.mark.parametrize(
    ("tokens", "short"), [((9, 31), {9}), ((31, 40), {31, 40}), ((3, 9), {3, 9}), ((), {*range(70)} - {31, 40, 63})]
)
def test_an_output_does_not_end_before_its_least_tokens_if_it_can_go_on(tokens, short):
    control = AtLeast(Allows(*tokens), 2, [31, 40, 63], 70)
    for _ in range(2):
        assert control.restricts(1) and allowed(control) == short and control.forced() == ()
        control.take([7])
    assert not control.restricts(1) and control.forced() == tokens
    assert allowed(control) == ({*tokens} if tokens else None)


class Recorded:
    """A control that allows token 9 only, and keeps what it is told."""

    def __init__(self):
        self.taken = []

    waits = False

    def restricts(self, pending):
        return True

    def forced(self):
        return (9, 9)

    def take(self, tokens):
        self.taken += tokens
        return "wrong" if 13 in tokens else None

    def mask(self):
        words = np.zeros(3, dtype=np.int32)
        words[0] = 1 << 9
        return words


def allowed(control):
    words = control.mask()
    return None if words is None else {t for t in range(70) if words[t // 32].view(np.uint32) >> np.uint32(t % 32) & 1}


@pytest.mark.parametrize("begin", [3, 31, 40])
def test_a_control_begins_behind_the_thought(begin):
    inner = Recorded()
    control = AfterThought(inner, begin, 50, [5, 6], 70)
    assert allowed(control) == {9, begin}, "to think or not to think"
    assert control.forced() == ()
    assert control.take([begin, 7]) is None and allowed(control) is None and control.forced() == ()
    assert control.take([8, 50]) is None and allowed(control) == {9} and inner.taken == []
    assert control.take([9, begin]) is None and inner.taken == [9, begin], "there is one thought only"
    assert control.forced() == (9, 9)
    assert control.take([13]) == "wrong"


def test_a_control_without_a_thought():
    inner = Recorded()
    control = AfterThought(inner, 3, 50, [3, 4, 50, 6], 70)
    assert control.take([9, 9]) is None and allowed(control) == {9} and inner.taken == [9, 9]


def test_a_thought_that_the_prompt_has_begun():
    inner = Recorded()
    control = AfterThought(inner, 3, 50, [3, 50, 3], 70)
    assert allowed(control) is None
    assert control.take([8, 50, 9]) is None
    assert inner.taken == [9] and allowed(control) == {9}


@pytest.mark.parametrize("after_thought", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_form_behind_a_thought(llm, after_thought, begun):
    """Both controls of a request: a budget ends the thought, then the grammar holds."""
    wish = StructuredOutputsParams(choice=["yes", "no"], after_thought=after_thought)
    prompt = [5, 6, 1, 7] if begun else [5, 6]
    budget = 6 if after_thought else None
    bias = None if begun else {1: 50.0, 2: 60.0}  # likes to think, and even more to end the thought
    params = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=wish, thinking_token_budget=budget, logit_bias=bias
    )
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    completion = output.outputs[0]
    tokens = list(completion.token_ids)
    assert completion.finish_reason == "stop" and completion.text.endswith(("yes", "no"))
    if not after_thought:
        assert completion.text in ("yes", "no") and not {1, 2} & set(tokens)
        return
    if begun:
        assert tokens.index(2) == 5, "one token of the thought stands in the prompt"
    else:
        assert tokens[:2] == [1, 2]
    assert llm.get_tokenizer().decode(tokens[tokens.index(2) + 1 :], skip_special_tokens=True) in ("yes", "no")
