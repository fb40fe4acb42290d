"""The config's data -> minibatches of token ids and labels, each a pure function of the position in the data."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from counterpoint.core.errors import ExecutionError
from counterpoint.job.config import Config
from counterpoint.job.corpus import Corpus, token_corpus
from counterpoint.job.encoders import has_tokenizer, load_encoder
from counterpoint.job.sources import TOKENS, find_sources
from counterpoint.job.token_cache import text_corpus

_ROUNDS = 4


@dataclass(frozen=True)
class Samples:
    """`count` windows of a corpus from `first` on, in an order of their own in every epoch."""

    corpus: Corpus
    first: int
    count: int
    seed: int
    vocabulary: int | None

    def batch(self, position: int, size: int) -> dict[str, Tensor]:
        """`size` samples from the `position`-th on, counted over all epochs."""
        windows = [self.corpus.window(self._place(position + i)) for i in range(size)]
        tokens = torch.stack([torch.from_numpy(window) for window in windows])
        limit = self.vocabulary
        if limit is not None and (int(tokens.max()) >= limit or int(tokens.min()) < 0):
            worst = int(tokens.max()) if int(tokens.max()) >= limit else int(tokens.min())
            raise ExecutionError(
                f"token {worst} at position {position} of the data is beyond the model's vocabulary of {limit}: "
                f"use the model's own tokenizer, or token files made with it"
            )
        return {"input_ids": tokens, "labels": tokens.clone()}

    def _place(self, position: int) -> int:
        epoch, index = divmod(position, self.count)
        return self.first + shuffled(index, self.count, f"{self.seed} {epoch}")


@dataclass(frozen=True)
class Data:
    """`digest` tells whether two runs read the same tokens; `about` says what was read, for people."""

    training: Samples
    held_out: Samples
    digest: str
    about: str

    def close(self) -> None:
        self.training.corpus.close()
        self.held_out.corpus.close()


def open_data(
    config: Config,
    vocabulary: int | None,
    weights: Path | None,
    cache: Path,
    say: Callable[[str], None] = lambda text: None,
) -> Data:
    """`cache` is the folder for tokenised text, `weights` the model's folder if it has one."""
    corpus = _corpus(config, config.data, vocabulary, weights, cache / "tokens.bin", say)
    held_count = 0 if config.validation_data else round(len(corpus) * config.validation_share)
    training = Samples(corpus, 0, len(corpus) - held_count, config.seed, vocabulary)
    held_out = Samples(corpus, training.count, held_count, config.seed, vocabulary)
    if config.validation_data:
        other = _corpus(config, config.validation_data, vocabulary, weights, cache / "validation.bin", say)
        held_out = Samples(other, 0, len(other), config.seed, vocabulary)
    _refuse_short(config, training, held_out)
    about = f"{corpus.num_tokens:,} tokens, {training.count:,} samples to train on, {held_out.count:,} held out"
    return Data(training, held_out, corpus.digest, about)


def shuffled(index: int, count: int, key: str) -> int:
    """Where `index` goes in a permutation of `count` places: a Feistel network, walked until it stays within.

    >>> sorted(shuffled(index, 10, "key") for index in range(10)) == list(range(10))
    True
    """
    half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    place = index
    while True:
        left, right = place >> half_bits, place & mask
        for turn in range(_ROUNDS):
            mixed = hashlib.blake2b(f"{key} {turn} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        place = left << half_bits | right
        if place < count:
            return place


def _corpus(
    config: Config,
    place: str,
    vocabulary: int | None,
    weights: Path | None,
    cache: Path,
    say: Callable[[str], None],
) -> Corpus:
    files = find_sources(place)
    if files[0].kind == TOKENS:
        return token_corpus(files, config.token_dtype, vocabulary, config.sequence_length)
    own = weights if weights is not None and has_tokenizer(weights) else None
    encoder = load_encoder(config.tokenizer or own)
    if vocabulary is not None and encoder.vocabulary > vocabulary:
        raise ValueError(
            f"the tokenizer has {encoder.vocabulary} tokens, the model's vocabulary {vocabulary}: "
            f"give the model's own tokenizer, or a model with a larger vocabulary"
        )
    return text_corpus(files, encoder, cache, config.sequence_length, say)


def _refuse_short(config: Config, training: Samples, held_out: Samples) -> None:
    needed = f"a minibatch needs {config.minibatch} of {config.sequence_length} tokens"
    if training.count < config.minibatch:
        raise ValueError(
            f"{config.data} is too short: {training.corpus.num_tokens} tokens make {training.count} samples to train "
            f"on, {needed}; give more data, or shorter sequences"
        )
    if config.evaluate_every and held_out.count < config.minibatch:
        raise ValueError(
            f"too little is held out: {held_out.count} samples, {needed}; raise validation_share, "
            f"give validation_data, or set evaluate_every: 0"
        )
