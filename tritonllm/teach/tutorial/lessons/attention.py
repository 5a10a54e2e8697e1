"""Lesson 1: what attention reads, why its keys and values are kept, and what that costs."""

from collections.abc import Iterator

import torch

from tritonllm.kernels import paged_decode_attention
from tritonllm.teach.tutorial.lab import Lab
from tritonllm.teach.tutorial.lesson import LessonQuestion, MultipleChoice, Number, Say, Step, ValueTable

PROMPT = "Once upon a time, there was a brave fox who"
NEW = 12  # tokens to generate


def steps() -> Iterator[Step]:
    yield from _one_query()
    lab = Lab()
    yield from _with_cache(lab)
    yield from _bytes(lab)


def _one_query() -> Iterator[Step]:
    yield Say(
        """
        A language model reads tokens, pieces of words, and gives a probability to each token that could come next. One
        is chosen and appended, and the model reads again. Inside, every token passes through layers. Most of a layer
        looks at each token alone. Attention is the part where a token looks at the others.

        For that, each token is turned into three short vectors: a query (what am I looking for?), a key (what do I have
        to offer?) and a value (what do I pass on?). The query is multiplied with every key. The products become weights
        that add up to 1 (softmax), and the result is the mean of the values with these weights.

        Here are three tokens with vectors of 16 numbers, of which only the first two are not 0. The kernel
        `paged_decode_attention` of this package computes the result; the weights are worked out beside it in torch.
        """
    )
    query, keys, values = torch.zeros(16), torch.zeros(3, 16), torch.zeros(3, 16)
    query[:2] = torch.tensor([4.0, 8.0])
    keys[:, :2] = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, -0.5]])
    values[:, :2] = torch.tensor([[10.0, 0.0], [0.0, 10.0], [5.0, 5.0]])
    scores = keys @ query / 16**0.5
    weights = scores.softmax(0)
    result = _kernel(query, keys, values)
    yield ValueTable(
        "query (4, 8)",
        ("token", "key", "value", "query x key / sqrt(16)"),
        [(i, _pair(keys[i]), _pair(values[i]), float(scores[i])) for i in range(3)],
    )
    yield LessonQuestion(
        "Which token's value has the largest part in the result?",
        MultipleChoice(("token 0", "token 1", "token 2"), int(weights.argmax())),
        ["Softmax keeps the order: the larger the product of query and key, the larger the weight."],
        f"""
        The weights are {", ".join(f"{w:.2f}" for w in weights.tolist())}. So the first number of the result is
        {weights[0]:.2f} x 10 + {weights[1]:.2f} x 0 + {weights[2]:.2f} x 5, and the kernel says ({result[0]:.2f},
        {result[1]:.2f}). The query points along the second axis, and so does the key of token 1.
        """,
    )


def _kernel(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query head over one block of keys and values."""
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([len(keys)], dtype=torch.int32)
    return paged_decode_attention(query[None, None], keys[None, :, None], values[None, :, None], table, length)[0, 0]


def _pair(vector: torch.Tensor) -> str:
    return f"({vector[0]:g}, {vector[1]:g})"


def _with_cache(lab: Lab) -> Iterator[Step]:
    prompt = lab.tokens(PROMPT)
    pieces = lab.pieces(prompt)
    yield Say(
        f"""
        A token looks only at itself and at those before it. So the key and the value of a token never change when more
        tokens follow, and an engine keeps them: that is the KV cache. When a new token comes, only its own query, key
        and value are computed. Everything older is read from the cache.

        The demo model now continues a prompt of {len(prompt)} tokens (a blank is shown as _):

            {" | ".join(pieces)}

        It generates {NEW} tokens. The first step computes the whole prompt and draws the first new token. Each step
        after that computes one token and draws the next one.
        """
    )
    lab.add("story", PROMPT, NEW)
    ran = lab.run()
    computed = sum(step.num_tokens for step in ran)
    yield ValueTable(
        "what the engine did",
        ("step", "tokens computed", "tokens in the cache behind it"),
        [(i, step.num_tokens, step.parts[0].start + step.num_tokens) for i, step in enumerate(ran[:4], 1)],
    )
    yield LessonQuestion(
        f"The table goes on like that until {NEW} tokens are drawn. How many tokens has the model computed by then?",
        Number(
            computed,
            traps={
                len(prompt) + NEW: "The last token is drawn, but nothing comes after it: is it ever computed?",
                NEW: "The tokens of the prompt have keys and values, too, and were computed in the first step.",
            },
        ),
        [
            f"The first step computes {len(prompt)} tokens and draws the first of the {NEW}.",
            f"There are {NEW} steps. All but the first compute one token.",
        ],
        f"""
        {len(prompt)} in the first step and 1 in each of the {NEW - 1} others: {computed}. The last token was drawn and
        never went through the model: its key would only be needed for a token after it. It wrote:
        "{lab.text("story")}".
        """,
    )
    yield from _without_cache(lab, prompt, computed)


def _without_cache(lab: Lab, prompt: list[int], computed: int) -> Iterator[Step]:
    forgetful = Lab(enable_prefix_caching=False)
    so_far = list(prompt)
    for i in range(NEW):  # a request for each token: the cache of the one before is gone
        so_far += forgetful.ask(str(i), so_far, 1).outputs[0].token_ids
    again = sum(step.num_tokens for step in forgetful.steps)
    same = so_far[len(prompt) :] == list(lab.outputs["story"].outputs[0].token_ids)
    yield Say(
        f"""
        What if the engine forgot everything after each token? It just did that, with {NEW} requests of one token each,
        each with all text so far as its prompt. The tokens are {"the same" if same else "different"}, but the model
        computed {again} tokens instead of {computed}. The longer the text, the worse the ratio: the work grows with the
        square of the length. That is why every engine has a KV cache, and why the rest of this tutorial is mostly about
        what to do with it.
        """
    )


def _bytes(lab: Lab) -> Iterator[Step]:
    spec = lab.model.spec
    attention = spec.layers[0].attention
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_size
    yield Say(
        f"""
        The cache costs memory. The demo model has {spec.num_layers} layers. In each of them a token has {heads} query
        heads (several attentions side by side), but only {kv_heads} key and {kv_heads} value heads: {heads // kv_heads}
        queries share one. That is grouped-query attention (GQA), made to shrink the cache. A head is {size} numbers,
        and a number is 4 bytes here (float32).
        """
    )
    each = lab.bytes_per_token
    yield LessonQuestion(
        "How many bytes of cache does one token take, over all layers?",
        Number(
            each,
            traps={
                each // 2: "A token has a key and a value.",
                each // spec.num_layers: "That is one layer.",
                each * heads // kv_heads: "Queries are used once and not kept. Count the key and value heads.",
                each // 4: "That is how many numbers there are; each has 4 bytes.",
            },
        ),
        ["Layers x 2 (key and value) x key/value heads x numbers of a head x bytes of a number."],
        f"""
        {spec.num_layers} x 2 x {kv_heads} x {size} x 4 = {each} bytes, which is what the engine's own tensors have for
        each of their slots. A model of 8 billion parameters (32 layers, 8 key/value heads of 128, 2 bytes) needs
        {32 * 2 * 8 * 128 * 2:,} bytes a token: a conversation of 8,000 tokens takes a gigabyte. Where to put
        all that is the next lesson.
        """,
    )
