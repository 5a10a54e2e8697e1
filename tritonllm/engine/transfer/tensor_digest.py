"""A digest of a tensor's bytes, computed where they are: 16 GB of weights need not come to the host for it.

Bytes are taken as words of 64 bits, the last one filled up with zeros, and words as rows. Each word is mixed with a
number that its place in the row has, in steps that can be undone; so no two values of a word are mixed to the same. Of
each row two sums are kept, modulo 2**64: of the mixed words, and of these times another odd number of their place. Sums
of integers do not depend on their order, so every device finds the same ones. The rows' sums, in order, are hashed on
the host (xxh3, 128 bits).

One word that differs always changes the first sum. Other changes do unless what they change of the mixed words adds up
to 0, in both sums: no checkpoint does that by chance, but who looks for such a change can find one. This tells weights
apart, and is no proof against forgery. On the CPU a core does some 0.7 GB in a second.
"""

from collections.abc import Iterable, Iterator

import torch
import xxhash

ROW = 1 << 16  # words; its mixed copy stays in a core's cache
ROWS = 16  # that a GPU mixes at a time: 8 MB, and a few times as much for what is in between
_FIRST, _SECOND = (
    -7046029254386353131,
    -4417276706812531889,
)  # odd; 2**64 over the golden ratio, and a prime of xxHash's
_LOW_32, _LOW_35 = (1 << 32) - 1, (1 << 35) - 1


def digest_of(tensors: Iterable[torch.Tensor]) -> bytes:
    """16 bytes that depend on every byte of these tensors and on their order, not on their shapes, strides or devices.

    Tensors are split into words one by one, so ``[a, b]`` and their concatenation differ. Waits for the devices.
    """
    places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
    digest = xxhash.xxh3_128()
    for tensor in tensors:
        if tensor.layout is not torch.strided:  # of oneDNN, on the CPU
            tensor = tensor.to_dense()
        if tensor.device not in places:
            places[tensor.device] = _numbers(tensor.device)
        digest.update(tensor.nbytes.to_bytes(8, "little"))
        pieces = _words(tensor, 1 if tensor.is_cpu else ROWS)
        found = [_sums(words, *places[tensor.device]) for words in pieces]
        if found:
            digest.update(torch.cat(found).cpu().numpy())
    return digest.digest()


def _words(tensor: torch.Tensor, rows: int) -> Iterator[torch.Tensor]:
    """``[rows, ROW]`` int64 or fewer rows at a time, and ``[1, words]`` of the last row if it is not whole."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // (8 * ROW) * 8 * ROW
    for start in range(0, whole, 8 * ROW * rows):
        some = data[start : min(start + 8 * ROW * rows, whole)]
        yield _aligned(some).view(torch.int64).view(-1, ROW)
    if whole < data.numel():
        rest = torch.nn.functional.pad(data[whole:], (0, -data.numel() % 8))
        yield _aligned(rest).view(torch.int64)[None]


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """The data as it is, or a copy if its words do not begin where words of 64 bits may."""
    return data.clone() if data.data_ptr() % 8 else data


def _numbers(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two of each place in a row: ``[ROW]`` int64, and odd ones."""
    both = _mix(torch.arange(1, 2 * ROW + 1, device=device))
    return both[:ROW], both[ROW:] | 1


def _sums(words: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``[rows, 2]`` int64."""
    count = words.shape[1]
    mixed = _mix(words ^ first[:count])
    sums = mixed.sum(1)
    return torch.stack([sums, mixed.mul_(second[:count]).sum(1)], 1)


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Spread every bit over the word, in place: the finalizer of MurmurHash3 (Appleby, 2011) with other numbers. Its
    first shift is for the highest bit, a float's sign, which a product would leave alone. Products wrap; what a shift
    brings in of the sign is masked."""
    words ^= (words >> 32).bitwise_and_(_LOW_32)
    words.mul_(_FIRST)
    words ^= (words >> 32).bitwise_and_(_LOW_32)
    words.mul_(_SECOND)
    words ^= (words >> 29).bitwise_and_(_LOW_35)
    return words
