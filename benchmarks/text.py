"""Real text without a download: Python's own sources, with a byte-level BPE tokenizer trained on them.

Tokens and tokenizer are cached in the user's cache folder. Text may also come from a file or a folder.
"""

from __future__ import annotations

import hashlib
import platform
import random
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import platformdirs
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.files import whole_file
from hf_cce.diagnostics.machine import Progress

END_OF_TEXT = "<|endoftext|>"
MAX_CHARACTERS = 32_000_000  # more text only takes longer and does not improve the measurement


@dataclass(frozen=True)
class Corpus:
    """Text as token ids, with the tokenizer that produced them."""

    source: str
    tokens_file: Path  # .npy, int32, 1-D
    tokenizer_file: Path  # tokenizer.json of the tokenizers library
    tokens: int
    entries: int  # of the tokenizer; the model's vocabulary may be larger

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.tokenizer_file))


def cache_folder() -> Path:
    """Return the platform's cache folder for hf_cce."""
    return platformdirs.user_cache_path("hf_cce", appauthor=False)


def prepare(
    vocabulary: int,
    *,
    dataset: str | None = None,
    characters: int = MAX_CHARACTERS,
    cache: Path | None = None,
    progress: Progress = lambda message: None,
) -> Corpus:
    """Return the corpus, from the cache or newly made.

    Args:
        vocabulary: maximum number of tokenizer entries; short text gives fewer.
        dataset: a text file or a folder of text files; default: Python's own sources.
        characters: maximum number of characters taken from Python's sources.
        cache: folder for tokenizer and tokens.
        progress: called with progress messages.

    Raises:
        ValueError: the file or folder does not exist.
    """
    progress("reading text")
    source, documents = _documents(dataset, vocabulary, characters)
    digest = hashlib.sha256(repr((source, vocabulary, tokenizers.__version__)).encode())
    for document in documents:
        digest.update(document.encode("utf-8", "replace"))
    folder = (cache or cache_folder()) / f"corpus-{digest.hexdigest()[:16]}"
    tokens_file, tokenizer_file = folder / "tokens.npy", folder / "tokenizer.json"
    if not tokens_file.is_file():  # this file is written last
        progress(f"training a byte-level BPE tokenizer on {sum(map(len, documents)) / 1e6:.0f} MB of text")
        tokenizer = train_tokenizer(documents, vocabulary)
        progress("turning the text into tokens")
        with whole_file(tokenizer_file) as temporary:
            tokenizer.save(str(temporary))
        with whole_file(tokens_file) as temporary:
            np.save(temporary, encode(tokenizer, documents))
    tokens = len(np.load(tokens_file, mmap_mode="r"))
    entries = Tokenizer.from_file(str(tokenizer_file)).get_vocab_size()
    return Corpus(source, tokens_file, tokenizer_file, tokens, entries)


def train_tokenizer(documents: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, like GPT-2's, of at most ``vocabulary`` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Iterable[str]) -> np.ndarray:
    """Return all documents as one array of token ids, each document followed by the end-of-text token if there is one."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ending = [] if end is None else [end]
    rows, rest = [], iter(documents)
    # In small batches: the encodings of the whole text at once would take gigabytes.
    while lot := list(islice(rest, 64)):
        for encoding in tokenizer.encode_batch_fast(lot, add_special_tokens=False):
            rows.append(np.asarray(encoding.ids + ending, dtype=np.int32))
    return np.concatenate(rows)


def windows(
    tokens_file: str | Path, count: tuple[int, ...], sequence: int, seed: int, part: tuple[float, float] = (0.0, 1.0)
) -> np.ndarray:
    """Return [*count, sequence] token ids (int64): windows of the text drawn at random with ``seed``.

    Args:
        part: the range of the text to draw from, as fractions (begin, end).

    Raises:
        ValueError: that part of the text is no longer than ``sequence``.
    """
    tokens = np.load(tokens_file, mmap_mode="r")
    begin, end = (round(share * len(tokens)) for share in part)
    tokens = tokens[begin:end]
    if len(tokens) <= sequence:
        raise ValueError(f"the text has only {len(tokens)} tokens, too few for sequences of {sequence}")
    starts = np.random.default_rng(seed).integers(len(tokens) - sequence, size=count)
    drawn = np.stack([tokens[start : start + sequence] for start in starts.reshape(-1)])
    return drawn.reshape(*count, sequence).astype(np.int64)


def _documents(dataset: str | None, vocabulary: int, characters: int) -> tuple[str, list[str]]:
    if dataset is not None:
        path = Path(dataset)
        if not path.exists():
            raise ValueError(f"--dataset {dataset}: no such file or folder")
        suffixes = {".txt", ".md", ".py", ".rst"}
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in suffixes)
        return path.name, list(_read(files))
    standard, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    files = [path for path in sorted(standard.rglob("*.py")) if not {"site-packages", "dist-packages"} & {*path.parts}]
    source = f"the standard library of Python {platform.python_version()}"
    documents = list(_capped(_read(files), characters))
    # The whole library (31 MB in Python 3.11) gives 49,152 entries. Some systems omit its tests, which leaves two thirds of it.
    if (size := sum(map(len, documents))) < (characters if characters > MAX_CHARACTERS else 500 * vocabulary):
        more = sorted(packages.rglob("*.py"))
        random.Random(0).shuffle(more)  # some files of every package, not only of the alphabetically first ones
        documents = list(dict.fromkeys([*documents, *_capped(_read(more), characters - size)]))
        source += " and installed packages"
    random.Random(0).shuffle(documents)
    return source, documents


def _read(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # the standard library's tests include deliberately broken files
        if text.strip():
            yield text


def _capped(documents: Iterable[str], characters: int) -> Iterator[str]:
    for document in documents:
        if characters <= 0:
            return
        yield document[:characters]
        characters -= len(document)
