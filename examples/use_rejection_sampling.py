"""Speculative decoding with the kernels alone: a drafter guesses, the target judges. Runs on a GPU or the CPU."""

import torch

from tritonllm.kernels import rejection_sample, sample, token_logprobs

device = "cuda" if torch.cuda.is_available() else "cpu"
vocab, drafts, length = 1000, 4, 40
g = torch.Generator().manual_seed(0)
target_of = (torch.randn(vocab, vocab, generator=g) * 3).to(device)  # a "model": the logits of what follows each token
drafter_of = target_of + torch.randn(vocab, vocab, generator=g).to(device)  # a cheaper one that is nearly as good
temperature, seeds = torch.tensor([0.8], device=device), torch.tensor([42], device=device)


def decode(with_probs: bool) -> tuple[list[int], int]:
    tokens, calls = [0], 0
    while len(tokens) < length:
        last, guesses, rows = torch.tensor([tokens[-1]], device=device), [], []
        for i in range(drafts):  # the drafter draws with the seed and step that the target will use
            rows.append(drafter_of[guesses[-1] if guesses else last])
            step = torch.tensor([len(tokens) + i], device=device)
            guesses.append(sample(rows[-1], temperature, None, None, None, seeds, step))
        draft_ids = torch.stack(guesses, 1)
        probs = (torch.stack(rows, 1) / temperature).softmax(-1) if with_probs else None
        logits = target_of[torch.cat([last[:, None], draft_ids], 1)]  # one pass of the target over all of them
        step = torch.tensor([len(tokens)], device=device)
        ids, accepted = rejection_sample(draft_ids, probs, logits, temperature, None, None, seeds, step)
        tokens += ids[0, : int(accepted) + 1].tolist()
        calls += 1
    return tokens[:length], calls


for with_probs in (True, False):
    tokens, calls = decode(with_probs)
    print(
        f"{'with' if with_probs else 'without'} probabilities: {length - 1} tokens in {calls} steps, {tokens[:8]} ..."
    )
_, logprobs, ranks = token_logprobs(target_of[tokens[:-1]], torch.tensor(tokens[1:], device=device), 0)
print(f"mean log-probability {logprobs.mean():.2f}, {int((ranks == 1).sum())} tokens were the likeliest")
