"""Lesson 7: guess several tokens, verify them in one step, and change nothing in the text."""

from collections.abc import Iterator

import torch

from tritonllm.demo import draft_path
from tritonllm.kernels import rejection_sample
from tritonllm.teach.tutorial.lab import Lab
from tritonllm.teach.tutorial.lesson import Exercise, LessonQuestion, MultipleChoice, Number, Say, Step, ValueTable

PROMPT, NEW, DRAFTS = "There was a fox named", 40, 4
ROWS = 4000
TARGET, DRAFT = (0.5, 0.3, 0.2, 0.0), (0.2, 0.6, 0.1, 0.1)  # a toy vocabulary of four tokens


def steps() -> Iterator[Step]:
    lab = Lab(speculative_config=_with_draft_model())
    yield from _draft_model(lab)
    yield from _verdict()
    yield from _ngrams()
    yield Exercise(
        """
        The exercise is the verdict on one draft. The check draws thousands of drafts and looks whether the tokens that
        come out follow the model's distribution.
        """
    )


def _with_draft_model() -> dict[str, object]:
    return {
        "method": "draft_model",
        "model": str(draft_path()),
        "num_speculative_tokens": DRAFTS,
        "adaptive": False,  # verify in every step, or the lesson would show less of it
    }


def _draft_model(lab: Lab) -> Iterator[Step]:
    yield Say(
        f"""
        To decode one token a GPU reads all weights, and computing is the smallest part of it. It could as well compute
        five tokens of the same sequence, if only it knew them. So let somebody guess: a much smaller draft model
        proposes the next {DRAFTS} tokens, one after the other, which is quick. Then the large model computes all
        {DRAFTS} of them in one step, as if they were a prompt. That gives its own opinion at each place. As long as the
        guesses are what it would have said itself, they are accepted. At the first place where they are not, its own
        token is taken. And behind {DRAFTS} accepted drafts it draws one more. So every step brings at least one token
        of the large model's own, and up to {DRAFTS} accepted drafts before it.

        The demo model (2.9 million parameters) writes {NEW} tokens with its draft model (0.7 million).
        """
    )
    lab.add("story", PROMPT, NEW)
    rows: list[tuple[object, ...]] = []
    known = 0
    while lab.llm.engine.has_unfinished_requests():
        step = lab.step()
        total = len(lab.outputs["story"].outputs[0].token_ids)
        drafts = step.parts[0].drafts
        new = lab.pieces(list(lab.outputs["story"].outputs[0].token_ids[known:]))
        rows.append((len(rows) + 1, drafts, total - known - 1 if drafts else 0, " ".join(new)))
        known = total
    stats = lab.llm.engine.stats
    accepted = stats.num_accepted_tokens
    yield ValueTable("the first steps", ("step", "drafts", "accepted", "new tokens"), rows[:5])
    yield LessonQuestion(
        f"In the whole run {stats.num_draft_tokens} tokens were drafted and {accepted} of them accepted. How many "
        f"steps did the {NEW} tokens take? (The first step, which computes the prompt, counts too.)",
        Number(
            stats.steps,
            traps={
                NEW: "That is without speculation: one token a step.",
                NEW // (DRAFTS + 1): "That would be so if every draft had been accepted.",
                accepted: "Each step brings one token of the model's own. The accepted drafts come on top.",
            },
        ),
        [f"Each step brings exactly one token that is no draft. Of the {NEW} tokens, {accepted} were drafts."],
        f"""
        {NEW} - {accepted} = {stats.steps}. Without speculation it would be {NEW}. Of the drafts
        {accepted / stats.num_draft_tokens:.0%} were right; by place in their step (first, second, ...) that is
        {", ".join(map(str, stats.num_accepted_tokens_per_pos))} of {stats.num_drafts}. Later places need all earlier
        ones to be right.
        """,
    )
    plain = list(Lab().ask("plain", PROMPT, NEW).outputs[0].token_ids)
    same = list(lab.outputs["story"].outputs[0].token_ids) == plain
    yield LessonQuestion(
        "The draft model is a much worse model. Is the text worse than what the large model writes alone?",
        MultipleChoice(("it is the same text", "it is another text"), 0 if same else 1),
        ["Who decides which tokens stay?"],
        f"""
        The engine without speculation wrote {"the same" if same else "other"} {NEW} tokens. A draft stays only where
        the large model would have taken the same token. A bad drafter costs time, never quality.
        """,
    )


def _verdict() -> Iterator[Step]:
    yield Say(
        """
        With greedy decoding it is clear what it means that a guess is right. With a temperature above 0 the large model
        has a distribution p over tokens, and the draft was drawn from the small model's distribution q. There is a rule
        that keeps a draft as often as possible and still gives tokens that follow p exactly:

            accept the draft x with probability min(1, p(x) / q(x));
            if it is rejected, draw from what p has more than q: max(0, p - q), scaled to sum 1.

        Averaged over the drafts, min(1, p/q) x q is min(p, q): the part that both distributions have in common.
        """
    )
    p, q = torch.tensor(TARGET), torch.tensor(DRAFT)
    drafts = torch.multinomial(q, ROWS, replacement=True, generator=torch.Generator().manual_seed(0))
    ids, accepted = rejection_sample(
        drafts[:, None],
        q.expand(ROWS, 1, -1),
        p.log().expand(ROWS, 2, -1),
        *(torch.ones(ROWS), None, None),
        seeds=torch.arange(ROWS),
        steps=torch.zeros(ROWS, dtype=torch.int64),
    )
    share = accepted.sum().item() / ROWS
    first = torch.bincount(ids[:, 0], minlength=len(TARGET)) / ROWS
    yield ValueTable(
        "a vocabulary of four tokens",
        ("token", "p (large model)", "q (draft model)"),
        [(name, *pair) for name, *pair in zip("abcd", TARGET, DRAFT, strict=True)],
    )
    yield LessonQuestion(
        "What part of the drafts is accepted? (Between 0 and 1.)",
        Number(
            share,
            tolerance=0.03,
            traps={
                1 - share: "That part is rejected.",
                sum(a * b for a, b in zip(TARGET, DRAFT, strict=True)): "That is how often two independent draws are "
                "equal. The rule does better.",
            },
        ),
        ["Take the smaller of p and q for each token, and add up."],
        f"""
        {" + ".join(f"{min(a, b):g}" for a, b in zip(TARGET, DRAFT, strict=True))} = {sum(map(min, TARGET, DRAFT)):g}.
        The kernel `rejection_sample` accepted {share:.3f} of {ROWS:,} drafts. And the tokens that it returned have the
        shares {", ".join(f"{x:.3f}" for x in first.tolist())}: that is p, although most of them were drawn from q.
        """,
    )


def _ngrams() -> Iterator[Step]:
    lab = Lab(speculative_config={"method": "ngram", "num_speculative_tokens": DRAFTS, "adaptive": False})
    text, new = "Sort 3, 9, 4, 1. Sorted: 1, 3, 4, 9. Sort 3, 9, 4, 1. Sorted:", 24
    lab.ask("again", text, new)
    stats = lab.llm.engine.stats
    yield Say(
        f"""
        Guesses need no second model. Texts repeat themselves: code, summaries, answers about a document. The method
        `ngram` looks for an earlier place with the same last tokens and proposes what followed there. After "{text}" it
        drafted {stats.num_draft_tokens} tokens, of which {stats.num_accepted_tokens} were accepted: {new} new tokens in
        {stats.steps} steps.
        """
    )
