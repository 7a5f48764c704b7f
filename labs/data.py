"""Training data: a corpus of bytes, and the batches that each rank takes from it.

    corpus()    bytes that are on this machine already: the standard library of the running Python
    Corpus      tokens with their size, hash and entropy (the loss of a model that knows only byte counts)
    Batches     batches[step] is this rank's part of batch number `step`, whatever was read before

The tokens are cut into windows of context + 1 tokens, one next to the other; a window's last token is only a target.
Each epoch reads every window once, in an order drawn from (seed, epoch). A batch is the next `batch` windows in this
order, and rank r reads the r-th of `ranks` equal parts of the batch. So no window is read twice in an epoch, and the
ranks together read the same batch, however many ranks there are. Windows that are too few to fill the epoch's last
batch are left out.

PyTorch's DistributedSampler differs in three ways. DistributedSampler assigns samples one by one: rank r of N takes
samples r, r + N, .... DistributedSampler fills the last batch by *repeating* the first samples of the epoch, which then
count twice, unless drop_last=True drops that batch. DistributedSampler also reads every epoch in the order of epoch 0,
unless set_epoch(epoch) is called.

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
    """A text as bytes.

    tokens: the bytes, a 1-D uint8 tensor on the CPU
    source: a description of the place that the bytes were read from
    """

    tokens: Tensor
    source: str

    @property
    def size(self) -> int:
        """Return the number of bytes in the corpus."""
        return len(self.tokens)

    @cached_property
    def sha256(self) -> str:
        """Return the hash of all bytes, in hexadecimal: two corpora with the same hash give the same losses."""
        return hashlib.sha256(self.tokens.numpy()).hexdigest()

    def __repr__(self) -> str:
        return f"Corpus({self.source}: {self.size:,} bytes, sha256 {self.sha256[:12]})"

    def unigram_entropy(self) -> float:
        """Return the entropy in nats per byte: the least loss of a model that knows only how often each byte occurs."""
        share = torch.bincount(self.tokens).double() / self.size
        return torch.special.entr(share).sum().item()

    def split(self, held_out: float = 0.05) -> tuple["Corpus", "Corpus"]:
        """Return two corpora: all but the last bytes, to train on, and the last bytes, to test on.

        held_out: the fraction of the bytes that is kept for the test, between 0 and 1
        """
        if not 0 < held_out < 1:
            raise ValueError(f"held_out is {held_out}: give the share of the corpus to test on, between 0 and 1")
        cut = self.size - round(self.size * held_out)
        return (
            Corpus(self.tokens[:cut], f"{self.source}, to train on"),
            Corpus(self.tokens[cut:], f"{self.source}, held out"),
        )


def corpus(directory: str | Path | None = None, hub: str | None = None) -> Corpus:
    """Read a corpus: by default this Python's own standard library, about 11 MB, which differs between versions.

    directory: a directory, whose text files are read instead, with those in its subdirectories
    hub: a Hugging Face dataset, the first 20,000 rows of whose column "text" are read instead; needs `datasets`

    Raises FileNotFoundError if the directory is missing or has no text, ImportError without `datasets`, ConnectionError
    if the hub cannot be read, and ValueError if the dataset has no text.
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
    """Return the files in and below a directory, without hidden ones, in the same order on every machine."""
    found = []
    for folder, subfolders, names in os.walk(directory):
        subfolders[:] = [name for name in subfolders if name not in without and not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    # Reading a pipe or a device might never end.
    files = [path for path in found if path.is_file()]
    return sorted(files, key=lambda path: path.relative_to(directory).as_posix())


def directory_text(directory: Path) -> bytes:
    if not directory.is_dir():
        raise FileNotFoundError(
            f"there is no directory {directory}: name one that has text, or leave it out to read the standard library"
        )
    texts = (path.read_bytes() for path in files_below(directory))
    # A file with a zero byte is taken for a binary one, as git does.
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
    """A rank's part of every batch: `x_BT, y_BT = batches[step]` gives inputs and, one token later, targets (int64).

    The tensors are made on the default device.  `len(batches)` is the number of steps in an epoch.  A step beyond the
    first epoch belongs to a later epoch; iterating over `batches` gives the steps of the first epoch.

    tokens: the corpus' tokens, 1-D, of any integer dtype; or an object with a length, whose method `windows(size)`
        returns a sequence of windows: indexed by n numbers, it gives a tensor [n, size]
    batch: number of windows in a step, on all ranks together
    context: number of tokens in a sequence
    seed: seed of the order in which windows are read
    rank, ranks: this rank's number, and the number of ranks that share a batch

    Raises ValueError if the batch is not divisible by the ranks, if `rank` is not one of the ranks, and if the corpus
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
        self.windows = tokens.windows(context + 1) if hasattr(tokens, "windows") else windows(tokens, context + 1)
        if len(self.windows) < batch:
            raise ValueError(
                f"a corpus of {len(tokens)} tokens is shorter than one batch of {batch} windows "
                f"of {context + 1}: take more text, or a smaller batch or context"
            )
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


def windows(tokens: Tensor, size: int) -> Tensor:
    count = len(tokens) // size
    return tokens[: count * size].view(count, size)


@lru_cache(maxsize=4)
def order(windows: int, seed: int, epoch: int) -> Tensor:
    """Draw the order in which an epoch reads the windows: a permutation that depends on (seed, epoch) alone."""
    digest = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big"))
    return torch.randperm(windows, generator=generator, device="cpu")
