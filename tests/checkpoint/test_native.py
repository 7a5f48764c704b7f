"""Tests of labs.native's checkpoints beside labs.checkpoint: equal numbers; and known problems, one by one.

References: a training that ran without a break, under PyTorch's FSDP and under ours.
"""

from copy import deepcopy

import pytest
import torch

from labs import native
from labs.checkpoint import load, save
from labs.kit.launch import run
from labs.kit.rows.fsdp_rows import layers_of, whole
from labs.mesh import Mesh
from tests.checkpoint.common import ADAMW, CONFIG, Extras, sharded
from tests.checkpoint.threads import RANKS, THREADS, all_of_them, matches


def theirs(seed):
    model = Extras(CONFIG, seed).double()
    native.fsdp(model, layers_of(model))
    return model, ADAMW(p for p in model.parameters() if p.requires_grad)


def ours(seed, ranks):
    return sharded(Extras(CONFIG, seed).double(), Mesh((ranks,), ("dp",)))


def trained(model, optimizer, first, last):
    """Train for these steps, and return the model's state."""
    for step in range(first, last):
        torch.manual_seed(step)
        model(*torch.randint(0, CONFIG.vocab, (2, 6, CONFIG.context))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(x).clone() for name, x in model.state_dict().items()}


def saved(folder):
    """Save with each of PyTorch's ways and with ours, and continue all of these trainings."""
    training = theirs(1)
    there = trained(*training, 0, 2)
    native.save_checkpoint(folder / "saved", *training)
    native.save_in_background(folder / "in background", *training).result()
    native.save_hugging_face(folder / "hugging face", training[0])
    full = deepcopy(native.states(*training, full=True))
    on = {"theirs": trained(*training, 2, 4)}
    for name in ("saved", "in background"):
        other = theirs(5)
        native.load_checkpoint(folder / name, *other)
        on[name] = trained(*other, 2, 4)
    other = theirs(6)
    native.set_states(*other, full, full=True)
    on["full"] = trained(*other, 2, 4)
    published, _ = theirs(7)
    native.load_hugging_face(folder / "hugging face", published)
    held, *training = ours(1, ranks=2)
    trained(*training, 0, 2)
    save(folder, 2, held)
    on["ours"] = trained(*training, 2, 4)
    return on, there, trained(published, None, 0, 0), len(full["model"])


def on_more_ranks(folder):
    other = theirs(8)
    native.load_checkpoint(folder / "saved", *other)
    held, *mine = ours(9, ranks=3)
    load(folder / "step-2", held)
    return trained(*other, 2, 4), trained(*mine, 2, 4)


def test_a_training_continues_with_theirs_as_with_ours(tmp_path):
    for rank, (on, there, published, gathered) in enumerate(run(saved, tmp_path, ranks=2)):
        for name in ("saved", "in background", "full"):
            torch.testing.assert_close(on[name], on["theirs"], rtol=0, atol=0, msg=name)
        torch.testing.assert_close(published, there, rtol=0, atol=0)
        torch.testing.assert_close(on["theirs"], on["ours"])
        assert gathered == (len(there) if rank == 0 else 0)
    for loaded_by_theirs, loaded_by_ours in run(on_more_ranks, tmp_path, ranks=3):
        torch.testing.assert_close(loaded_by_theirs, loaded_by_ours)
        torch.testing.assert_close(loaded_by_ours, on["ours"])


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return the outcome on each rank, for each thread."""
    everyones = run(all_of_them, tmp_path_factory.mktemp("threads"), ranks=RANKS)
    return dict(zip(THREADS, zip(*everyones, strict=True), strict=True))


@pytest.mark.parametrize("thread", THREADS, ids=lambda thread: thread.name)
def test_ours_is_right_or_says_so(thread, played):
    for _, found in played[thread]:
        assert matches(found, thread.ours), found


@pytest.mark.parametrize("thread", THREADS, ids=lambda thread: thread.name)
def test_pytorch_does_what_the_table_says(thread, played):
    for found, _ in played[thread]:
        if not torch.__version__.startswith("2.13") and not matches(found, thread.theirs):
            pytest.skip(f"PyTorch {torch.__version__} does something else: {found}")
        assert matches(found, thread.theirs), found
