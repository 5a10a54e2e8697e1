"""A logits processor of whole steps, where other processes can import it."""

import torch


class Bans:
    """The tokens below ``extra_args["below"]``, for requests that ask."""

    def __init__(self, seats, vocab, device):
        self.below = torch.zeros(seats, 1, dtype=torch.int64, device=device)
        self.tokens = torch.arange(vocab, device=device)

    def admit(self, seat, params, prompt, output):
        self.below[seat] = (params.extra_args or {}).get("below", 0)
        return bool(self.below[seat])

    def apply(self, logits, seats, steps):
        logits.masked_fill_((self.tokens < self.below[seats]) & (seats >= 0)[:, None], -torch.inf)

    def count(self, seats, tokens):
        pass
