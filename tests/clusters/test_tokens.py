"""Tests of token files: the same windows as one tensor, each file by itself, and a place that is found again."""

import numpy as np
import pytest
import torch

from labs.clusters.tokens import read
from labs.data import Batches


def test_windows_of_several_files_are_those_of_each(tmp_path):
    first, second = np.arange(0, 200, dtype=np.uint16), np.arange(300, 400, dtype=np.uint16)
    first.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", second.astype(np.int32))
    tokens, held_out = read(tmp_path, vocab=512)
    assert (len(tokens), len(held_out)) == (190 + 95, 10 + 5)
    windows = tokens.windows(20)
    assert len(windows) == 190 // 20 + 95 // 20
    expected = torch.cat([torch.arange(0, 180).view(9, 20), torch.arange(300, 380).view(4, 20)])
    assert torch.equal(windows[torch.arange(13)], expected)
    assert torch.equal(windows[torch.tensor([9, 0])], expected[[9, 0]])


def test_batches_are_those_of_a_tensor_and_do_not_depend_on_what_was_read_before(tmp_path):
    numbers = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint16)
    np.save(tmp_path / "a.npy", numbers)
    tokens, _ = read(tmp_path, vocab=256)
    ours = Batches(tokens, batch=4, context=9, rank=1, ranks=2)
    theirs = Batches(torch.from_numpy(numbers[:950].astype(np.int64)), batch=4, context=9, rank=1, ranks=2)
    for step in (7, 0, 30):
        for x, y in zip(ours[step], theirs[step], strict=True):
            assert torch.equal(x, y)


def test_what_is_no_tokens_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 2)))
    with pytest.raises(ValueError, match=r"a.npy has float64 numbers of shape \(2, 2\): tokens are 1-D integers"):
        read(tmp_path, vocab=256)
    np.save(tmp_path / "a.npy", np.full(100, 300))
    tokens, _ = read(tmp_path, vocab=256)
    with pytest.raises(ValueError, match="the data has token 300, and the model's vocabulary ends at 255"):
        Batches(tokens, batch=1, context=9)[0]
    with pytest.raises(ValueError, match="text has 256, its bytes"):
        read(None, vocab=100)
