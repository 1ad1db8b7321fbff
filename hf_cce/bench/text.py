"""Real text without a download: Python's own sources, and a byte-level BPE tokenizer trained on them on the spot.

Both are made once and kept in the user's cache folder. Text and tokenizer may also come from a file, a folder or a hub.
"""

from __future__ import annotations

import hashlib
import os
import platform
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hf_cce.bench import hub
from hf_cce.bench.files import whole_folder

END_OF_TEXT = "<|endoftext|>"
MAX_CHARACTERS = 32_000_000  # more text makes no better demo, only a longer wait
_OF_FILES = {".txt", ".md", ".py", ".rst", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".gz", ".zst", ".zip"}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Corpus:
    """Text as token ids, with the tokenizer that made them."""

    source: str
    tokens_file: Path  # .npy, int32, one dimension
    tokenizer_file: Path  # tokenizer.json of the tokenizers library
    tokens: int
    entries: int  # of the tokenizer; the model's vocabulary may be larger

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.tokenizer_file))


def cache_folder() -> Path:
    """Where the platform wants such things: XDG on Linux, ~/Library/Caches on macOS, %LOCALAPPDATA% on Windows."""
    return platformdirs.user_cache_path("hf_cce", appauthor=False)


def prepare(
    vocabulary: int,
    *,
    dataset: str | None = None,
    model: str | None = None,
    characters: int = MAX_CHARACTERS,
    cache: Path | None = None,
    say: Say = lambda message: None,
) -> Corpus:
    """The corpus, from the cache or made now.

    Args:
        vocabulary: entries that the tokenizer may have at most; it gets fewer where the text does not give more.
        dataset: a text file, a folder of text files, or a data set's name on the hub; default: Python's own sources.
        model: take this model's tokenizer (name on the hub or local folder) instead of training one.
        characters: how much of Python's sources, or of the hub's data set, to take at most; for more than the standard
            library has, the installed packages' sources are taken too.
        cache: folder to keep tokenizer and tokens in.
        say: told, in a few words, what is being done.
    """
    say("reading text")
    source, documents = _documents(dataset, vocabulary, characters)
    # Its own content and not its name: a folder may hold another model by the next run.
    given = None if model is None else _tokenizer_of(model)
    known_by = vocabulary if given is None else given.to_str()
    digest = hashlib.sha256(repr((source, known_by, tokenizers.__version__)).encode())
    for document in documents:
        digest.update(document.encode("utf-8", "replace"))
    folder = (cache or cache_folder()) / f"corpus-{digest.hexdigest()[:16]}"
    if not folder.is_dir():
        with whole_folder(folder) as fresh:
            tokenizer = given
            if tokenizer is None:
                say(f"training a byte-level BPE tokenizer on {sum(map(len, documents)) / 1e6:.0f} MB of text")
                tokenizer = train_tokenizer(documents, vocabulary)
            tokenizer.save(str(fresh / "tokenizer.json"))
            say("turning the text into tokens")
            np.save(fresh / "tokens.npy", encode(tokenizer, documents))
    tokens_file, tokenizer_file = folder / "tokens.npy", folder / "tokenizer.json"
    return Corpus(
        source=source,
        tokens_file=tokens_file,
        tokenizer_file=tokenizer_file,
        tokens=len(np.load(tokens_file, mmap_mode="r")),
        entries=Tokenizer.from_file(str(tokenizer_file)).get_vocab_size(),
    )


def train_tokenizer(documents: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer such as GPT-2's or SmolLM2's, of ``vocabulary`` entries or fewer."""
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
    """All documents as one row of token ids, each closed by the end-of-text token where the tokenizer has one."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ending = [] if end is None else [end]
    rows, rest = [], iter(documents)
    # In small lots: the encodings of all the text at once would take gigabytes.
    while lot := list(islice(rest, 64)):
        for encoding in tokenizer.encode_batch_fast(lot, add_special_tokens=False):
            rows.append(np.asarray(encoding.ids + ending, dtype=np.int32))
    return np.concatenate(rows)


def windows(tokens_file: str | Path, count: tuple[int, ...], sequence: int, seed: int) -> np.ndarray:
    """[*count, sequence] token ids (int64): windows of the text that ``seed`` draws, and nothing else does.

    Raises:
        ValueError: the text is no longer than ``sequence``.
    """
    tokens = np.load(tokens_file, mmap_mode="r")
    if len(tokens) <= sequence:
        raise ValueError(f"the text has only {len(tokens)} tokens; --seq {sequence} needs more of it")
    starts = np.random.default_rng(seed).integers(len(tokens) - sequence, size=count)
    drawn = np.stack([tokens[start : start + sequence] for start in starts.reshape(-1)])
    return drawn.reshape(*count, sequence).astype(np.int64)


def _documents(dataset: str | None, vocabulary: int, characters: int) -> tuple[str, list[str]]:
    if dataset is None:
        return _python_sources(vocabulary, characters)
    path = Path(dataset)
    if path.is_file():
        return path.name, list(_read([path]))
    if path.is_dir():
        return path.name, list(_read(sorted(p for p in path.rglob("*") if p.suffix in {".txt", ".md", ".py", ".rst"})))
    return dataset, list(_capped(_rows_of(dataset), characters))


def _python_sources(vocabulary: int, characters: int = MAX_CHARACTERS) -> tuple[str, list[str]]:
    """The standard library's files, shuffled; with installed packages where it alone gives too few distinct words.

    Some systems ship the library without its tests, and two thirds of the text are tests.
    """
    standard = Path(sysconfig.get_path("stdlib"))
    packages = Path(sysconfig.get_path("purelib"))
    files = [path for path in sorted(standard.rglob("*.py")) if not {"site-packages", "dist-packages"} & {*path.parts}]
    source = f"the standard library of Python {platform.python_version()}"
    documents = list(_capped(_read(files), characters))
    # Measured: the whole library of Python 3.11 (31 MB) gives 49,152 entries and more, 11 MB without tests give 40,000.
    if sum(map(len, documents)) < (characters if characters > MAX_CHARACTERS else 500 * vocabulary):
        more = sorted(packages.rglob("*.py"))
        random.Random(0).shuffle(more)  # some of every package, not all of those that begin with an a
        documents = list(_capped(dict.fromkeys(chain(documents, _capped(_read(more), characters))), characters))
        source += " and installed packages"
    random.Random(0).shuffle(documents)
    return source, documents


def _read(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # the library's tests hold files that are broken on purpose
        if text.strip():
            yield text


def _capped(documents: Iterable[str], characters: int) -> Iterator[str]:
    left = characters
    for document in documents:
        if left <= 0:
            return
        yield document[:left]
        left -= len(document)


def _rows_of(dataset: str) -> Iterator[str]:
    # A name on the hub is "name" or "owner/name"; who wrote anything else meant a file, and shall not wait for the hub.
    if (
        Path(dataset).suffix in _OF_FILES
        or dataset.startswith((".", "/", "~"))
        or "\\" in dataset
        or dataset.count("/") > 1
    ):
        raise ValueError(f"--dataset {dataset}: no such file or folder")
    if not hub.answers(dataset, "README.md", "dataset"):
        os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when datasets is imported: only what is in its cache
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"--dataset {dataset}: no such file or folder here, and a data set from the hub needs "
            "the package datasets (pip install 'hf-cce[bench]')"
        ) from None
    try:
        rows: Any = load_dataset(dataset, split="train", streaming=True)
    except Exception as error:  # the hub's client has dozens
        why = hub.first_line(error)
        raise ValueError(
            f"--dataset {dataset}: no such file or folder here, and the hub did not give it: {type(error).__name__}: {why}"
        ) from None
    column = ""
    for row in rows:
        column = column or ("text" if "text" in row else next((k for k, v in row.items() if isinstance(v, str)), ""))
        if not column:
            raise ValueError(f"--dataset {dataset}: no column of text among {sorted(row)}")
        yield row[column]


def _tokenizer_of(model: str) -> Tokenizer:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(hub.reachable(model))
    if not tokenizer.is_fast:
        raise ValueError(f"--model {model}: its tokenizer has no fast version, which the demo needs")
    return tokenizer.backend_tokenizer
