"""What the tests of chains and of trees of drafts share."""

import torch


def parameters(device, temperature=1.0, top_k=0, top_p=1.0, *, rows=1, seed=0, step=0):
    """Sampling parameters of `rows` sequences with consecutive seeds."""
    return (
        torch.full((rows,), temperature, device=device),
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, device=device),
        torch.arange(seed, seed + rows, device=device),
        torch.full((rows,), step, dtype=torch.int64, device=device),
    )


def target_probs(logits, temperature=1.0, top_k=0, top_p=1.0):
    probs = torch.softmax(logits.double().cpu() / temperature, 0)
    sorted_probs, order = probs.sort(descending=True, stable=True)
    sorted_probs = sorted_probs * (torch.arange(len(probs)) < (top_k or len(probs)))
    sorted_probs /= sorted_probs.sum()
    sorted_probs *= sorted_probs.cumsum(0) - sorted_probs < top_p
    return torch.zeros_like(probs).scatter(0, order, sorted_probs / sorted_probs.sum())


TARGETS = [{}, {"temperature": 0.6}, {"top_k": 4}, {"temperature": 1.5, "top_k": 20, "top_p": 0.8}]
