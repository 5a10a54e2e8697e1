"""From text to token ids: a byte-level BPE tokenizer with single digits, and the corpus encoded by many processes.

BPE: Sennrich, Haddow and Birch, "Neural Machine Translation of Rare Words with Subword Units" (2016); over bytes:
Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

import multiprocessing
import re
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import documents
from .chat import END_OF_TEXT, SPECIAL_TOKENS

# A word with the space or apostrophe before it, one digit, a run of signs, one space. A number never takes a space
# with it, so that 47 is the same two tokens wherever it stands.
PATTERN = r"[ ']?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"

DOCUMENTS_PER_SHARD = 3000
TOKENIZER_DOCUMENTS = 20_000


class Corpus(NamedTuple):
    tokens: np.ndarray  # [T] int16: documents one after the other, each ended by <|endoftext|>
    starts: np.ndarray  # [D] int64: where each document begins
    share: dict[str, float]  # of the tokens, by kind of document


def train_tokenizer(seed: int, vocab_size: int, count: int = TOKENIZER_DOCUMENTS) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    special = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
    texts = (special.sub("\n", text) for _, text in documents(seed, 1, count))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@lru_cache(maxsize=1)
def _tokenizer(json: str) -> Tokenizer:
    return Tokenizer.from_str(json)


def _encode_shard(shard: int, seed: int, tokenizer_json: str) -> tuple[np.ndarray, np.ndarray, Counter]:
    """Token ids and length of each document of a shard, and the number of tokens by kind."""
    tokenizer = _tokenizer(tokenizer_json)
    end = tokenizer.token_to_id(END_OF_TEXT)
    kinds, texts = zip(*documents(seed, shard, DOCUMENTS_PER_SHARD), strict=True)
    encoded = [[*encoding.ids, end] for encoding in tokenizer.encode_batch_fast(list(texts))]
    lengths = np.array([len(ids) for ids in encoded])
    by_kind: Counter = Counter()
    for kind, length in zip(kinds, lengths, strict=True):
        by_kind[kind] += int(length)
    return np.concatenate([np.array(ids, np.int16) for ids in encoded]), lengths, by_kind


def encode(tokenizer: Tokenizer, seed: int, shards: Iterable[int], workers: int) -> Corpus:
    """The shards in the order given, whatever the number of worker processes."""
    task = partial(_encode_shard, seed=seed, tokenizer_json=tokenizer.to_str())
    if workers == 1:
        parts = [task(shard) for shard in shards]
    else:
        # forked workers: a spawned one would import torch first
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            parts = list(pool.map(task, shards))
    tokens, lengths, kinds = zip(*parts, strict=True)
    ends = np.cumsum(np.concatenate(lengths))
    share = {kind: count / int(ends[-1]) for kind, count in sum(kinds, Counter()).most_common()}
    return Corpus(np.concatenate(tokens), np.concatenate([[0], ends[:-1]]), share)
