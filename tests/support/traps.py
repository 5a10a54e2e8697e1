"""Drafters that fail on every rank but the first: code of a user runs on all of them."""

import multiprocessing
import time

from tritonllm.engine.drafts.drafters import NgramDrafter
from tritonllm.engine.step.drawing import Drawing


class Trap(NgramDrafter):
    def __init__(self, max_model_len, vocab_size, device):
        super().__init__(2, 5)
        self._steps = 0

    def propose(self, step):
        self._steps += 1
        if self._steps > 3 and multiprocessing.parent_process() is not None:
            self.fail()
        super().propose(step)


class Raises(Trap):
    def fail(self):
        raise ValueError("7 is no lucky number")


class Hangs(Trap):
    def fail(self):
        while True:
            time.sleep(0.1)


class OtherPositions(Trap):
    """The last step's state of this rank's device is not what it was."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self._step = None

    def propose(self, step):
        self._step = step
        super().propose(step)

    def fail(self):
        self._step.positions.add_(1)


class OtherTokens(NgramDrafter):
    """Rank 1 changes what rank 0 has drawn, from its fourth step on."""

    def __init__(self, max_model_len, vocab_size, device):
        super().__init__(2, 5)
        if multiprocessing.current_process().name == "tritonllm-rank-1":
            draw_otherwise()


def draw_otherwise(steps=3):
    """From now on this process has other tokens than rank 0, but not in the first ``steps`` steps."""

    def other(draw):
        def drawn(self, *arguments):
            nonlocal steps
            tokens = draw(self, *arguments)
            steps -= 1
            if steps < 0:
                tokens[0] = (tokens[0] + 1).clamp_max(9)
            return tokens

        return drawn

    Drawing._share_drawn = other(Drawing._share_drawn)
    Drawing._draw_by_shards = other(Drawing._draw_by_shards)


class NeverMade(Trap):
    def __init__(self, *arguments):
        if multiprocessing.parent_process() is not None:
            raise ValueError("only the first rank is made")
        super().__init__(*arguments)
