"""Which kernels suit a step's lengths: decided on the host, once a step, from lengths that it knows. No torch.

A launch may not depend on what the device alone knows, and must not depend on capacity where length decides: that 8
sequences of 16,000 keys had tables for 131,072 chose a kernel for few short ones, 12.9 ms a token in place of 7.3. So
the host names a regime, a captured step is captured once for each (it is a part of a graph's key), the warm-up visits
all of them, and attention finds it in its metadata.
"""

import enum

import numpy as np


class LengthRegime(enum.Enum):
    """One so far, which suits all lengths: attention chooses its kernels by capacity still."""

    ANY = "any"


def choose_regime(decode_lens: np.ndarray) -> LengthRegime:
    """The regime of a step whose decodes have so many keys ``[D]``: true lengths, or the least that they can be where
    a step in flight decides how many tokens it accepts."""
    return LengthRegime.ANY
