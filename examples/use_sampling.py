"""Next tokens from logits in your own loop: temperature, top-k, top-p, penalties. Runs on a GPU or the CPU."""

import torch

from tritonllm.kernels import Entry, count_tokens, make_logit_edits, sample, write_seat

device = "cuda" if torch.cuda.is_available() else "cpu"
vocab, rows = 32000, 3
torch.manual_seed(0)
logits = torch.randn(rows, vocab, device=device) * 3

# One value a row: the first is greedy, the second has no limits, the third has two.
temperature = torch.tensor([0.0, 0.8, 0.8], device=device)
top_k = torch.tensor([0, 0, 50], device=device, dtype=torch.int32)
top_p = torch.tensor([1.0, 1.0, 0.9], device=device)
seeds = torch.tensor([0, 7, 7], device=device)

# What requests change about their logits has a seat on the device; rows 0 and 2 have one, row 1 has none.
edits = make_logit_edits(seats=2, vocab=vocab, device=device)
write_seat(edits, 0, prompt=[1, 2, 3], presence=2.0)
write_seat(edits, 1, repetition=1.2, entries=[Entry(token=5, value=-float("inf"))])
seats = torch.tensor([0, -1, 1], device=device, dtype=torch.int32)

chosen = []
for step in range(5):
    steps = torch.full((rows,), step, device=device)
    # Rows with a seat are edited in place, so a model's new logits would come in here at every step.
    tokens = sample(logits.clone(), temperature, top_k, top_p, None, seeds, steps, edits=edits, seats=seats)
    count_tokens(edits, seats, tokens)
    chosen.append(tokens)
for row, tokens in enumerate(torch.stack(chosen, 1).tolist()):
    print(f"row {row}: {tokens}")  # the presence penalty keeps row 0 from repeating its argmax
