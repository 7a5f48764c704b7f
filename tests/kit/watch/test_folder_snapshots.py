"""Tests of labs.kit.watch.folder_snapshots: each call that changes the folder is a moment, and a crash at each."""

import shutil

import torch.distributed as dist
from torch import nn

from labs.checkpoint import Held, newest, save
from labs.kit import draw, play
from labs.kit.launch import run
from labs.kit.watch.folder_snapshots import watch_folder
from tests.checkpoint.common import linear


def two_saves(folder):
    model: nn.Module = linear()
    folder.mkdir(exist_ok=True)
    dist.barrier()
    with watch_folder(folder, newest) as moments:
        save(folder, 1, Held(model))
        save(folder, 2, Held(model))
    shutil.rmtree(folder / "step-1", ignore_errors=True)  # nobody watches this call
    return moments


def test_two_saves_moment_by_moment(tmp_path):
    moments = run(two_saves, tmp_path / "here", ranks=2, device="cpu")[0]
    at = {moment.next: number for number, moment in enumerate(moments)}
    assert len(at) < len(moments) and moments[-1].next == "nothing more"
    for step, before in ((1, ""), (2, "step-1")):
        renamed = at[f"rename step-{step}.draft"]
        made = at[f"make step-{step}.draft"]
        assert [moment.newest for moment in moments[made : renamed + 1]] == [before] * (renamed + 1 - made)
        assert [moment.next for moment in moments[made + 1 : renamed]].count("flush") >= 3  # file, index, folder
        files = {
            f"step-{step}.draft/{name}" for name in ("index.json", *(f"rank-{r}-of-2.safetensors" for r in (0, 1)))
        }
        assert files <= set(moments[renamed].files) and moments[renamed + 1].newest == f"step-{step}"
    film = play.crashes(moments)
    film.controls["frame"].value = at["rename step-2.draft"] + 1
    assert "a crash now: step-2 is loaded" in film.stage.value and "nothing to load" in draw.folder(moments, 0).text


def test_what_is_read_for_each_number_of_ranks():
    for saved in (1, 3, 4, 5):
        for loading in (1, 2, 4, 6):
            reads = [words.split() for words in draw.reads(12, saved, loading).text.splitlines()[1:]]
            spans = [tuple(map(int, words[3].split(":"))) for words in reads]
            assert sum(stop - start for start, stop in spans) == 12
            assert {int(words[1]) for words in reads} == set(range(loading))
