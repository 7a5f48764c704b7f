"""What the model reads: a corpus of bytes, and the batches that each rank takes from it.

    corpus()    bytes already on this machine: the standard library of the Python that runs this
    Corpus      tokens with their size, hash and entropy (the loss of a model that knows only byte counts)
    Batches     batches[step] is this rank's part of batch number `step`, whatever was read before

How a batch is found. The tokens are cut into windows of context + 1, one next to the other (the last one
gives only a target). Each epoch takes every window once, in an order drawn from (seed, epoch). A batch is the
next `batch` windows in this order, and rank r takes the r-th of `ranks` equal parts: no window is read twice,
and whatever the number of ranks, together they read the same batch. The windows that do not fill a batch wait
for another epoch.

PyTorch's DistributedSampler does three things differently: it deals windows out one by one (rank r takes r, r +
N, ...); it evens out a tail by *repeating* the first samples, which then count twice, unless drop_last=True
drops it; and it draws the order of epoch 0 again in every epoch in which set_epoch(epoch) was forgotten.

Shape suffixes: B batch (of one rank), T time = context.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

NOT_THE_LIBRARY = ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages")
HUB_ROWS = 20_000


@dataclass(frozen=True, eq=False)
class Corpus:
    """Text as bytes: tokens is a 1-D uint8 tensor on the CPU, source says where they were read."""

    tokens: Tensor
    source: str

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.tokens)

    @cached_property
    def sha256(self) -> str:
        """The hash of all bytes, in hexadecimal: two corpora with the same hash give the same losses."""
        return hashlib.sha256(self.tokens.numpy()).hexdigest()

    def __repr__(self) -> str:
        return f"Corpus({self.source}: {self.size:,} bytes, sha256 {self.sha256[:12]})"

    def unigram_entropy(self) -> float:
        """Nats per byte: the least loss of a model that knows nothing but how often each byte occurs."""
        share = torch.bincount(self.tokens).double() / self.size
        return torch.special.entr(share).sum().item()

    def split(self, held_out: float = 0.05) -> tuple["Corpus", "Corpus"]:
        """The corpus without its last part, and that part: the share `held_out` of the bytes, to test on."""
        if not 0 < held_out < 1:
            raise ValueError(f"held_out is {held_out}: it is a share of the corpus, between 0 and 1")
        cut = self.size - round(self.size * held_out)
        return (
            Corpus(self.tokens[:cut], f"{self.source}, to train on"),
            Corpus(self.tokens[cut:], f"{self.source}, held out"),
        )


def corpus(directory: str | Path | None = None, hub: str | None = None) -> Corpus:
    """The bytes of this Python's own standard library (about 11 MB; they differ between Python versions).

    directory: the text files below this directory instead. hub: the first 20,000 rows of column "text" of
    this Hugging Face dataset instead, for those who are online and have installed `datasets`. Raises
    FileNotFoundError where a directory is missing or has no text, ImportError without `datasets`,
    ConnectionError where the hub cannot be read, ValueError where it has no text.
    """
    if directory is not None and hub is not None:
        raise ValueError(f"a corpus is read from directory {directory} or from hub {hub}: give one of them")
    if hub is not None:
        return from_bytes(hub_text(hub), f"Hugging Face {hub}")
    if directory is not None:
        return from_bytes(directory_text(Path(directory)), str(directory))
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [path.read_bytes() for path in files_below(library, NOT_THE_LIBRARY) if path.suffix == ".py"]
    return from_bytes(b"\n".join(texts), f"standard library of Python {sysconfig.get_python_version()}")


def from_bytes(text: bytes, source: str) -> Corpus:
    return Corpus(torch.frombuffer(bytearray(text), dtype=torch.uint8), source)


def files_below(directory: Path, without: tuple[str, ...] = ()) -> list[Path]:
    """The files of a directory and of those below it, hidden ones left out, in one order everywhere."""
    found = []
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = [name for name in subfolders if name not in without and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    # A pipe or a device would be read for ever.
    files = [path for path in found if path.is_file()]
    return sorted(files, key=lambda path: path.relative_to(directory).as_posix())


def directory_text(directory: Path) -> bytes:
    if not directory.is_dir():
        raise FileNotFoundError(
            f"there is no directory {directory}: name one that has text, or leave it out to read the standard library"
        )
    texts = (path.read_bytes() for path in files_below(directory))
    # A zero byte is how git, too, tells binary files from text.
    text = b"\n".join(text for text in texts if b"\0" not in text)
    if not text:
        raise FileNotFoundError(
            f"directory {directory} has no text files: name another, or leave it out to read the standard library"
        )
    return text


def hub_text(name: str) -> bytes:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"hub={name!r} needs the library `datasets`: pip install datasets, "
            "or leave hub out to read the standard library"
        ) from error
    try:
        rows = datasets.load_dataset(name, split="train", streaming=True)
        texts = [row.get("text") for row in islice(rows, HUB_ROWS)]
    except OSError as error:
        raise ConnectionError(
            f"hub={name!r} could not be read ({error}): check the name and the network, "
            "or leave hub out to read the standard library"
        ) from error
    if not texts or None in texts:
        raise ValueError(f"hub={name!r} has no column 'text' with text in it: choose a dataset that has")
    return "\n".join(texts).encode()


class Batches:
    """`x_BT, y_BT = batches[step]`: this rank's inputs and, one token later, its targets (int64).

    They are made on the default device; an epoch that is over is followed by the next.
    tokens: 1-D, of any integer dtype. batch: windows in a step on all ranks together. `len(batches)` is the
    number of steps in an epoch, and iterating gives the first epoch.
    Raises ValueError where the batch is not divisible by the ranks, the rank is not among them, or the corpus
    is shorter than one batch; IndexError for a step below 0.
    """

    def __init__(self, tokens: Tensor, batch: int, context: int, seed: int = 0, rank: int = 0, ranks: int = 1) -> None:
        if min(batch, context, ranks) < 1:
            raise ValueError(f"batch {batch}, context {context} and ranks {ranks} must each be at least 1")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks} ranks: they are 0 to {ranks - 1}")
        if batch % ranks:
            near = batch // ranks * ranks
            raise ValueError(
                f"batch {batch} is not divisible by {ranks} ranks: take {near + ranks}"
                + (f" or {near}" if near else "")
            )
        windows = len(tokens) // (context + 1)
        if windows < batch:
            raise ValueError(
                f"a corpus of {len(tokens)} tokens is shorter than one batch of {batch} windows "
                f"of {context + 1}: take more text, or a smaller batch or context"
            )
        self.windows = tokens[: windows * (context + 1)].view(windows, context + 1)
        self.batch, self.seed, self.rank, self.ranks = batch, seed, rank, ranks

    def __len__(self) -> int:
        return len(self.windows) // self.batch

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        if step < 0:
            raise IndexError(f"step {step} is below 0: the first batch is batches[0]")
        epoch, step = divmod(step, len(self))
        share = self.batch // self.ranks
        start = step * self.batch + self.rank * share
        chosen = order(len(self.windows), self.seed, epoch)[start : start + share]
        tokens = self.windows[chosen].long().to(torch.get_default_device())
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self[step] for step in range(len(self)))


@lru_cache(maxsize=4)
def order(windows: int, seed: int, epoch: int) -> Tensor:
    """The numbers 0 to windows - 1 as this epoch reads them: a permutation drawn from (seed, epoch) alone."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big"))
    return torch.randperm(windows, generator=generator, device="cpu")
