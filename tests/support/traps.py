"""Drafters that fail on every rank but the first: code of a user runs on all of them."""

import multiprocessing
import time

from tritonllm.engine.drafters import NgramDrafter


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


class NeverMade(Trap):
    def __init__(self, *arguments):
        if multiprocessing.parent_process() is not None:
            raise ValueError("only the first rank is made")
        super().__init__(*arguments)
