"""Tests of the corpus against its files and hashlib, and of batches against a list of windows.

Where PyTorch's own DistributedSampler differs, it is compared, too. A module takes the hub's place: tests use no
network.
"""

import hashlib
import math
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DistributedSampler

from labs.data import Batches, Corpus, corpus

NUMBERS = torch.arange(1000)


def windows_of(batches: Batches, steps: range) -> list[tuple[int, ...]]:
    """Return the windows of these steps, inputs and last target together."""
    found = []
    for step in steps:
        x_BT, y_BT = batches[step]
        assert torch.equal(x_BT[:, 1:], y_BT[:, :-1])
        found += [(*x.tolist(), y[-1].item()) for x, y in zip(x_BT, y_BT, strict=True)]
    return found


def test_the_standard_library_is_read_where_it_is():
    text = corpus()
    whole = bytes(text.tokens.tolist())
    assert text.tokens.dtype == torch.uint8 and text.tokens.ndim == 1
    assert text.size == len(whole) > 5_000_000
    assert text.sha256 == hashlib.sha256(whole).hexdigest() == corpus().sha256
    assert f"{text.size:,} bytes" in repr(text) and text.sha256[:12] in repr(text)
    library = Path(types.__file__).parent
    left_out = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
    names = (path.relative_to(library) for path in library.rglob("*.py"))
    names = sorted(name.as_posix() for name in names if not left_out & set(name.parts))
    assert whole == b"\n".join((library / name).read_bytes() for name in names)


def test_unigram_entropy_is_that_of_the_byte_counts():
    text = corpus()
    counts = Counter(text.tokens.tolist()).values()
    expected = -sum(n / text.size * math.log(n / text.size) for n in counts)
    assert math.isclose(text.unigram_entropy(), expected, rel_tol=1e-12)
    assert 2 < expected < math.log(256)
    four = Corpus(torch.tensor([7, 8, 9, 10], dtype=torch.uint8), "four bytes")
    assert math.isclose(four.unigram_entropy(), math.log(4))


def test_split_cuts_the_last_part_off():
    text = Corpus(torch.arange(100, dtype=torch.uint8), "a hundred")
    train, held_out = text.split(0.1)
    assert torch.equal(torch.cat((train.tokens, held_out.tokens)), text.tokens)
    assert (train.size, held_out.size) == (90, 10)
    with pytest.raises(ValueError, match=r"held_out is 1\.5"):
        text.split(1.5)


def test_a_directory_of_text(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\0\1")
    (tmp_path / ".hidden").write_text("no")
    text = corpus(directory=tmp_path)
    assert bytes(text.tokens.tolist()) == b"first\nsecond"
    assert str(tmp_path) in text.source


def test_a_directory_without_text_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no directory .*nowhere: name one that has text, or"):
        corpus(directory=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="has no text files: name another, or"):
        corpus(directory=tmp_path)
    with pytest.raises(ValueError, match="give one of them"):
        corpus(directory=tmp_path, hub="name")


def hub_of(monkeypatch, load_dataset) -> None:
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


def test_a_hub_corpus(monkeypatch):
    hub_of(monkeypatch, lambda name, split, streaming: iter([{"text": "one"}, {"text": "två"}]))
    text = corpus(hub="someone/stories")
    assert bytes(text.tokens.tolist()) == "one\ntvå".encode()
    assert text.source == "Hugging Face someone/stories"


def test_a_hub_corpus_that_cannot_be_had_says_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets, or leave hub out"):
        corpus(hub="someone/stories")

    def offline(name, split, streaming):
        raise ConnectionError("Couldn't reach it")

    hub_of(monkeypatch, offline)
    with pytest.raises(ConnectionError, match=r"'someone/stories' could not be read \(Couldn't reach it\).*or leave"):
        corpus(hub="someone/stories")
    hub_of(monkeypatch, lambda name, split, streaming: iter([{"image": 1}]))
    with pytest.raises(ValueError, match="has no column 'text'"):
        corpus(hub="someone/pictures")


def test_an_epoch_reads_every_window_once():
    batches = Batches(NUMBERS, batch=6, context=9)
    read = windows_of(batches, range(len(batches)))
    windows = [tuple(range(start, start + 10)) for start in range(0, 1000, 10)]
    # 100 windows are 16 batches of 6; which 4 are left out differs between epochs.
    assert len(batches) == 16 and len(read) == len(set(read)) == 96 and set(read) <= set(windows)
    assert read != sorted(read)
    following = windows_of(batches, range(16, 32))
    assert len(set(following)) == 96 and following != read


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 12])
def test_ranks_read_one_process_batch_without_overlap(ranks):
    whole = Batches(NUMBERS, batch=12, context=4, seed=7)
    parts = [Batches(NUMBERS, batch=12, context=4, seed=7, rank=rank, ranks=ranks) for rank in range(ranks)]
    for step in (0, 5, len(whole), 3 * len(whole) + 1):
        for i in (0, 1):
            assert torch.equal(torch.cat([part[step][i] for part in parts]), whole[step][i])


def test_any_step_can_be_resumed():
    straight = Batches(NUMBERS, batch=4, context=4, seed=1)
    wanted = {step: straight[step] for step in (70, 3, 51, 0)}
    for step, (x_BT, y_BT) in wanted.items():
        fresh_x, fresh_y = Batches(NUMBERS, batch=4, context=4, seed=1)[step]
        assert torch.equal(fresh_x, x_BT) and torch.equal(fresh_y, y_BT)
    assert not torch.equal(straight[0][0], Batches(NUMBERS, batch=4, context=4, seed=2)[0][0])
    # An order drawn from seed + epoch would repeat here.
    other = Batches(NUMBERS, batch=4, context=4, seed=2)
    assert not torch.equal(straight[len(straight)][0], other[0][0])


def test_batches_are_int64_contiguous_and_follow_the_default_device():
    batches = Batches(corpus().tokens, batch=4, context=8)
    for part in batches[0]:
        assert part.dtype == torch.int64 and part.shape == (4, 8) and part.is_contiguous()
    with torch.device("meta"):
        assert batches[0][0].device.type == "meta"


def test_iterating_gives_one_epoch():
    batches = Batches(NUMBERS, batch=20, context=9)
    assert len(list(batches)) == len(batches) == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch": 10, "ranks": 4}, "batch 10 is not divisible by 4 ranks: take 12 or 8"),
        ({"batch": 3, "ranks": 4}, "batch 3 is not divisible by 4 ranks: take 4$"),
        ({"rank": 4, "ranks": 4}, "rank 4 is not one of 4 ranks: they are 0 to 3"),
        ({"rank": -1}, "rank -1 is not one of 1 ranks"),
        ({"ranks": 0}, "ranks 0 must each be at least 1"),
        ({"context": 0}, "context 0 .* must each be at least 1"),
        ({"batch": 256}, "1000 tokens is shorter than one batch of 256 windows of 10"),
    ],
)
def test_impossible_batches_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Batches(NUMBERS, **{"batch": 4, "context": 9, **arguments})


def test_a_step_below_zero_is_refused():
    with pytest.raises(IndexError, match="step -1 is below 0"):
        Batches(NUMBERS, batch=4, context=9)[-1]


def sampled(samples: int, ranks: int, epoch: int | None = None, drop_last: bool = False) -> list[list[int]]:
    """Return what each rank reads with DistributedSampler."""
    found = []
    for rank in range(ranks):
        sampler = DistributedSampler(range(samples), ranks, rank, drop_last=drop_last)
        if epoch is not None:
            sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def test_distributed_sampler_repeats_samples_to_even_a_tail_and_we_drop_it():
    theirs = Counter(i for part in sampled(10, 4) for i in part)
    assert sum(theirs.values()) == 12 and sorted(theirs.values())[-2:] == [2, 2]
    dropped = Counter(i for part in sampled(10, 4, drop_last=True) for i in part)
    assert sum(dropped.values()) == 8 and max(dropped.values()) == 1

    parts = [Batches(torch.arange(20), batch=4, context=1, rank=rank, ranks=4) for rank in range(4)]
    ours = Counter(window for part in parts for window in windows_of(part, range(len(part))))
    assert sum(ours.values()) == 8 and max(ours.values()) == 1


def test_distributed_sampler_without_set_epoch_repeats_its_order_and_we_cannot():
    assert sampled(10, 2) == sampled(10, 2) == sampled(10, 2, epoch=0)
    assert sampled(10, 2, epoch=1) != sampled(10, 2, epoch=0)

    batches = Batches(torch.arange(20), batch=2, context=1)
    first, second = (windows_of(batches, range(5 * epoch, 5 * epoch + 5)) for epoch in (0, 1))
    assert first != second and set(first) == set(second)


def test_distributed_sampler_assigns_round_robin_and_we_cut():
    order = sampled(12, 1)[0]
    assert sampled(12, 3) == [order[rank::3] for rank in range(3)]
