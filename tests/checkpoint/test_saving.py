"""Tests of labs.checkpoint.saving: what cannot be saved is refused on all ranks, and the last checkpoint stays."""

import math
import os
import resource
import shutil
from threading import Event, get_ident

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import fsdp
from labs.checkpoint import Held, Remembered, Saver, index, load, newest, save, saving
from labs.kit.launch import RankError, run
from labs.mesh import Mesh
from tests.checkpoint.common import ADAMW, alone, linear, words_of

NO_STEPS = [-1, True, 1.5, None, "3", [1], "../../evil"]


class IndexLike:
    """An integer as numpy's are: an object with `__index__`."""

    def __index__(self):
        return 4


def test_what_cannot_be_saved_is_reported_on_all_ranks_and_nothing_is_left(tmp_path):
    def body():
        model, rank, said = linear(), dist.get_rank(), []
        save(tmp_path, 1, Held(model))
        said.append(words_of(lambda: save(tmp_path, 1, Held(model))))
        said.append(words_of(lambda: save(tmp_path, 2, Held(model), {"at": rank})))
        said.append(words_of(lambda: save(tmp_path, 2 + rank, Held(model))))
        said.append(words_of(lambda: save(tmp_path, 2, Held(model), own={1} if rank else None)))
        said.append(words_of(lambda: save(tmp_path, 2, Held(model), values=[{"milestones": {30: 1}}])))
        said.append(words_of(lambda: save(tmp_path / str(rank), 2, Held(model))))
        (tmp_path / "file").touch()
        said.append(words_of(lambda: save(tmp_path / "file", 2, Held(model))))
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
        said.append(words_of(lambda: save(tmp_path, 2, Held(model))))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        with torch.no_grad():
            model.bias += rank
        said.append(words_of(lambda: save(tmp_path, 2, Held(model))))
        held, model, optimizer = alone(linear())
        if rank == 1:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        said.append(words_of(lambda: save(tmp_path, 2, held)))
        return said, sorted(path.name for path in tmp_path.iterdir()), newest(tmp_path).name

    for said, left, last in run(body, ranks=2):
        assert (left, last) == (["file", "step-1"], "step-1")
        for words, sentence in zip(
            said,
            [
                "step-1 is there already",
                'values= is {"at": 0} on rank 0 and {"at": 1} on rank 1',
                "step= is 2 on rank 0 and 3 on rank 1",
                "own= cannot be JSON (Object of type set is not JSON serializable)",
                "values= has a key 30, which JSON would load as a string",
                "/0 on rank 0 and ",
                "file is a file, or lies in one: give a folder",
                "rank-1-of-2.safetensors cannot be written",
                "'model/bias' differs on ranks 0 and 1, which both hold it",
                "the optimizer keeps 'exp_avg' of 'weight' on rank 1, but not on rank 0, which holds the same",
            ],
            strict=True,
        ):
            assert sentence in (words or ""), words


def test_a_step_is_an_integer_that_can_be_found_again(tmp_path):
    def body():
        held, folder = Held(linear()), tmp_path / "runs" / "a"
        said = [words_of(lambda: save(folder, step, held)) for step in NO_STEPS]  # noqa: B023
        return (
            said,
            [path.name for path in tmp_path.iterdir()],
            save(folder, IndexLike(), held).name,
            newest(folder).name,
        )

    for said, left, saved, last in run(body, ranks=2):
        assert said == [f"step= is {step!r}: give an integer, 0 or more" for step in NO_STEPS]
        assert (left, saved, last) == ([], "step-4", "step-4")


def test_what_each_rank_gave_as_its_own_comes_back_by_rank(tmp_path):
    def body(folder, step):
        save(folder, step, Held(linear()), {"lr": [0.1, 1e-9]}, {"rank": dist.get_rank()})

    run(body, tmp_path, 3, ranks=2)
    expected = Remembered(3, {"lr": [0.1, 1e-9]}, [{"rank": 0}, {"rank": 1}])
    assert run(lambda: load(newest(tmp_path), Held(linear(1))), ranks=3) == [expected] * 3


def test_values_are_equal_in_any_order_and_come_back_as_json_has_them(tmp_path):
    def body():
        values = {"a": (1, 2), "b": math.nan, "c": 3}
        values = values if dist.get_rank() else dict(reversed(values.items()))
        return load(save(tmp_path, 1, Held(linear()), values, (1,)), Held(linear()))

    for found in run(body, ranks=2):
        assert found.own == [[1], [1]] and found.values.pop("b") != 0 and found.values == {"a": [1, 2], "c": 3}


def test_what_lies_in_the_same_memory_or_out_of_order_is_saved(tmp_path):
    def make(seed):
        model = linear(seed)
        model.register_buffer("row", model.weight.detach()[1])
        model.register_buffer("column", model.weight.detach()[:, 1])
        model.register_buffer("turned", torch.arange(6.0).add(seed).view(2, 3).t())
        return model

    def body():
        model, other = make(0), make(1)
        load(save(tmp_path, 1, Held(model)), Held(other))
        return all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))

    assert all(run(body, ranks=2))


def test_a_parameter_on_no_rank_is_reported(tmp_path):
    def body():
        model, first = fsdp.fully_shard(linear(), mesh=Mesh((2,), ("dp",))), dist.new_group([0])
        if dist.get_rank() == 0:
            return words_of(lambda: save(tmp_path, 1, Held(model), group=first))

    assert "1 of the 3 elements of 'model/bias' are on no rank" in run(body, ranks=2)[0]


def test_a_rank_that_dies_while_it_saves_leaves_the_last_checkpoint(tmp_path):
    def body(step, victim=None):
        if dist.get_rank() == victim:
            saving.flush = lambda path: os._exit(9)
        save(tmp_path, step, Held(linear()))

    run(body, 1, ranks=2)
    for victim in (1, 0):
        with pytest.raises(RankError):
            run(body, 2, victim, ranks=2)
        assert newest(tmp_path).name == "step-1" and len([*tmp_path.glob("step-2.*.draft")]) == (victim == 0)
        assert run(lambda: load(newest(tmp_path), Held(linear(1))), ranks=3)[0].step == 1
    run(body, 2, ranks=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_what_cannot_be_removed_is_left_and_each_folder_that_was_made_is_flushed(tmp_path):
    def body():
        held, flushed, folder = Held(linear()), [], tmp_path / "runs" / "a"
        flush = index.flush
        index.flush = lambda path: (flushed.append(str(path.relative_to(tmp_path))), flush(path))
        save(folder, 1, held)
        if dist.get_rank() == 0:
            (folder / "step-1.file.draft").touch()
            (folder / "step-1.link.draft").symlink_to(folder / "step-1")
            shutil.copytree(folder / "step-1", folder / "step-9.dead.draft")
        dist.barrier()
        return flushed[:2], [save(folder, step, held).name for step in (2, 3)]

    (flushed, saved), _ = run(body, ranks=2)
    assert set(flushed) == {".", "runs"} and saved == ["step-2", "step-3"]
    left = sorted(path.name for path in (tmp_path / "runs" / "a").iterdir())
    assert left == ["step-1", "step-1.file.draft", "step-1.link.draft", "step-2", "step-3"]


def test_where_files_can_no_longer_be_opened_nothing_is_left(tmp_path):
    def body():
        held, said = Held(linear()), []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        for more in range(2):
            if dist.get_rank() == 0:
                resource.setrlimit(resource.RLIMIT_NOFILE, (free + more, hard))
            said.append(words_of(lambda: save(tmp_path, 1, held)))
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        dist.barrier()  # rank 0 may still remove its files
        return said, list(tmp_path.iterdir())

    for said, left in run(body, ranks=2):
        assert not left and all("Too many open files" in words for words in said), (said, left)


def test_a_folder_at_home_is_named_as_in_a_shell(tmp_path):
    def body():
        os.environ["HOME"] = str(tmp_path)
        held = Held(linear())
        path = save("~/runs", 1, held)
        return str(path), load("~/runs/step-1", held).step, newest("~/runs") == path

    assert run(body, ranks=1) == [(str(tmp_path / "runs" / "step-1"), 1, True)]


def test_a_save_leaves_one_that_is_not_finished_alone(tmp_path):
    def body():
        held, rank, main, commit = Held(linear()), dist.get_rank(), get_ident(), saving.commit
        begun, go = Event(), Event()

        def later(*arguments):
            if get_ident() != main:
                begun.set()
                go.wait()
            return commit(*arguments)

        saving.commit = later
        saver = Saver(tmp_path)
        saver.save(5, held)
        if rank == 0:
            begun.wait()
        saved = [save(tmp_path, 6, held).name]
        go.set()
        return [*saved, saver.wait().name]

    assert run(body, ranks=2) == [["step-6", "step-5"]] * 2


def test_of_two_jobs_that_save_one_step_one_wins(tmp_path):
    def body():
        rank, commit = dist.get_rank(), saving.commit
        alone = [dist.new_group([each]) for each in (0, 1)][rank]

        def in_turn(*arguments):
            for each in (0, 1):
                dist.barrier()  # both have a draft
                if each == rank:
                    try:
                        commit(*arguments)
                    except ValueError as error:
                        lost.append(error)
            if lost:
                raise lost[0]

        saving.commit, lost = in_turn, []
        words = words_of(lambda: save(tmp_path, 1, Held(linear(rank)), group=alone))
        dist.barrier()
        other = linear(2)
        load(newest(tmp_path), Held(other))
        return words, torch.equal(other.weight, linear(0).weight), [path.name for path in tmp_path.iterdir()]

    (won, *first), (lost, *second) = run(body, ranks=2)
    assert won is None and "step-1 is there already, by another job" in lost
    assert first == second == [True, ["step-1"]]


def test_only_a_checkpoint_can_be_the_newest_and_an_unreadable_folder_is_reported(tmp_path):
    assert newest(tmp_path / "nowhere") is None and newest(tmp_path) is None
    (tmp_path / "step-9").touch()
    (tmp_path / "step-8").mkdir()
    assert newest(tmp_path) is None
    with pytest.raises(OSError, match=r"step-9 cannot be listed \(.*Not a directory"):
        newest(tmp_path / "step-9")

    def body():
        (tmp_path / "closed").mkdir(mode=0)
        if os.geteuid() == 0:  # root may look everywhere
            os.seteuid(65534)
        return words_of(lambda: newest(tmp_path / "closed"))

    said = run(body, ranks=1)[0]
    (tmp_path / "closed").chmod(0o700)  # allow its removal
    assert "closed cannot be listed (" in said


def test_an_optimizer_of_another_model_is_reported():
    with pytest.raises(ValueError, match=r"the optimizer has a parameter of shape \(2, 2\) that is in no model given"):
        alone_with_another = ADAMW([nn.Parameter(torch.ones(2, 2))])
        Held(nn.Linear(2, 2), optimizer=alone_with_another)
