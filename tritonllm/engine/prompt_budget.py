"""How many tokens of prompts a step takes in while others decode. No torch.

A step of decodes reads the weights and computes little; up to about 290 tokens an H200 computes while it reads them.
So a small chunk of a prompt beside decodes is all but free. A large one makes each of them wait: of Llama-3.1-8B a
token then takes 190 ms instead of 5, with `max_num_batched_tokens` of 8192 (chunked prefill and its budget: Agrawal et
al., "Sarathi-Serve", OSDI 2024). On the other hand, small chunks let prompts queue up when many come at once.

Hence a step takes as many as let the queue be empty in ``STEPS`` steps, but at least ``BESIDE``. A prompt of 8192
tokens takes 16 steps of some 13 ms instead of one of 190; where hundreds of prompts wait, steps are as full as without
decodes. The numbers are powers of two, which captured steps have room for (:mod:`tritonllm.engine.graphs`).
"""

BESIDE = 256
STEPS = 16


def prompt_budget(most: int, queued: int) -> int:
    """Tokens of prompts in a step with decodes.

    Args:
        most: tokens of a step.
        queued: tokens of all prompts that are not computed yet.
    """
    wanted = -(-queued // STEPS)
    return min(most, max(BESIDE, 1 << max(0, wanted - 1).bit_length()))
