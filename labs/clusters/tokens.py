"""The data of a training: the corpus, a folder of text, or a folder of token files.

    tokens, held_out = read(folder)             # both are read by labs.data.Batches
    Batches(tokens, batch, context)[step]       # a training that goes on at `step` goes on at its place

Token files are mapped into memory, so that a rank reads only the windows that it trains on:

    *.npy    numbers of any integer dtype, as numpy.save writes a 1-D array
    *.bin    numbers of 16 bits without a head, as nanoGPT and llm.c keep GPT-2's tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from labs.data import Corpus, corpus

HELD_OUT = 0.05  # the part of the data that is not trained on


@dataclass(frozen=True, eq=False)
class TokenFiles:
    """The tokens of several files, in memory maps; no window reaches from one file into the next."""

    files: Sequence[np.ndarray]
    vocab: int

    def __len__(self) -> int:
        return sum(map(len, self.files))

    def windows(self, size: int) -> Windows:
        return Windows(self.files, size, self.vocab)

    def split(self, held_out: float = HELD_OUT) -> tuple[TokenFiles, TokenFiles]:
        """Return the tokens to train on and the last ones of each file, to test on."""
        cuts = [len(file) - round(len(file) * held_out) for file in self.files]
        pairs = [(file[:cut], file[cut:]) for file, cut in zip(self.files, cuts, strict=True)]
        first, last = ([pair[part] for pair in pairs] for part in (0, 1))
        return TokenFiles(first, self.vocab), TokenFiles(last, self.vocab)


class Windows:
    """The windows of token files, numbered through all files: `windows[indices]` reads these, [n, size] (int64)."""

    def __init__(self, files: Sequence[np.ndarray], size: int, vocab: int) -> None:
        self.files, self.size, self.vocab = files, size, vocab
        self.stops = np.cumsum([len(file) // size for file in files])

    def __len__(self) -> int:
        return int(self.stops[-1])

    def __getitem__(self, indices: Tensor) -> Tensor:
        rows = np.empty((len(indices), self.size), dtype=np.int64)
        for row, index in zip(rows, indices.tolist(), strict=True):
            number = int(np.searchsorted(self.stops, index, side="right"))
            start = (index - (self.stops[number - 1] if number else 0)) * self.size
            row[:] = self.files[number][start : start + self.size]
        if (largest := rows.max(initial=0)) >= self.vocab:
            raise ValueError(f"the data has token {largest}, and the model's vocabulary ends at {self.vocab - 1}")
        return torch.from_numpy(rows)


def read(folder: Path | None, vocab: int) -> tuple[Tensor | TokenFiles, Tensor | TokenFiles]:
    """Return the tokens to train on, and those to test on.

    folder: a folder of token files, or else of text files; None is the corpus of the course.
    vocab: the number of tokens that the model knows; text has 256, its bytes.
    Raises FileNotFoundError for a folder without either, and ValueError for a file that has no 1-D integers.
    """
    found = [] if folder is None else sorted([*folder.glob("*.npy"), *folder.glob("*.bin")])
    if not found and vocab < 256:
        raise ValueError(f"the model's vocabulary has {vocab} tokens, and text has 256, its bytes: take another model")
    parts: tuple[TokenFiles | Corpus, TokenFiles | Corpus]
    parts = (TokenFiles([mapped(path) for path in found], vocab) if found else corpus(folder)).split(HELD_OUT)
    first, second = (part.tokens if isinstance(part, Corpus) else part for part in parts)
    return first, second


def mapped(path: Path) -> np.ndarray:
    try:
        file = np.memmap(path, np.uint16, "r") if path.suffix == ".bin" else np.load(path, mmap_mode="r")
    except ValueError as error:
        raise ValueError(f"{path} has no tokens ({error}): write it with numpy.save, or leave it out") from None
    if file.ndim != 1 or file.dtype.kind not in "iu":
        raise ValueError(f"{path} has {file.dtype} numbers of shape {file.shape}: tokens are 1-D integers")
    return file
