"""Tests of labs.checkpoint.background: a file has the values of the moment of save(), and errors of a thread are
raised.
"""

import contextlib
import gc
import os
import resource
import signal
import subprocess
import threading
import time
import weakref
from concurrent.futures import wait
from dataclasses import replace
from threading import Event

import pytest
import torch
import torch.distributed as dist

from labs.checkpoint import Held, Saver, background, load, newest, saving
from labs.checkpoint.parts import Part
from labs.checkpoint.tensor_blocks import whole
from labs.kit.launch import RankError, run
from labs.model import GPT
from tests.checkpoint.common import CONFIG, LAYOUTS, Extras, linear, numbers, same, steps, words_of
from tests.depth import deepen
from tools import warm


def held_up(name, module=saving):
    """Hold up a thread's calls of this function of labs.checkpoint until the returned event is set."""
    go, do = Event(), getattr(module, name)

    def later(*arguments):
        go.wait()
        return do(*arguments)

    setattr(module, name, later)
    return go, lambda: setattr(module, name, do)


def saved_while_training(folder, layouts):
    """Return the layouts under which the file has other values, or the copies take new memory."""
    wrong = []
    for layout in layouts:
        held, *training = LAYOUTS[layout][1](Extras(CONFIG, 1))
        steps(*training, 0, 1)
        expected, places = {}, []
        with Saver(folder / layout) as saver:
            for step in (1, 2, 3):
                # Rank 0's thread goes on to its first collective, the threads of the others do not, and training goes
                # on to its own.
                go, restore = held_up("finish", background) if dist.get_rank() else held_up("write")
                saver.save(step, held, {"lr": 0.5}, {"rank": dist.get_rank()})
                expected[step] = numbers(held)
                steps(*training, step, step + 1)
                assert not saver.writing.done()
                go.set()
                saver.wait()
                restore()
                places.append({piece: x.data_ptr() for piece, x in saver.copies.items()})
        for step in (1, 2, 3):
            found = load(folder / layout / f"step-{step}", held)
            assert (found.step, found.values, found.own[-1]) == (step, {"lr": 0.5}, {"rank": dist.get_world_size() - 1})
            if not same(numbers(held), expected[step]):
                wrong.append((layout, step))
        if not places[2].items() == places[1].items() <= places[0].items():
            wrong.append((layout, places))
    return wrong


@pytest.mark.parametrize("ranks", [2, *deepen(1, 3, 4)])
def test_a_step_that_follows_is_not_in_the_file(ranks, tmp_path):
    layouts = [layout for layout, (its, _) in LAYOUTS.items() if its == ranks]
    for wrong in run(saved_while_training, tmp_path, layouts, ranks=ranks):
        assert not wrong


def test_a_second_save_waits_for_the_first(tmp_path):
    def body():
        write = saving.write
        saving.write = lambda *arguments: (time.sleep(0.2), write(*arguments))[1]
        values, there = {"at": [1]}, []
        with Saver(tmp_path) as saver:
            assert saver.wait() is None
            for step in (1, 2, 3):
                saver.save(step, Held(linear()), values)
                values["at"].append(1)  # the thread still writes
                there.append(newest(tmp_path))
        return there, saver.wait(), [load(tmp_path / f"step-{n}", Held(linear(1))).values["at"] for n in (1, 2, 3)]

    for (_, *there), last, values in run(body, ranks=2):
        assert [path.name for path in (*there, last)] == ["step-1", "step-2", "step-3"]
        assert values == [[1], [1, 1], [1, 1, 1]]


def test_an_error_in_a_thread_is_raised_on_all_ranks_by_the_next_call(tmp_path):
    def body():
        held, said = Held(linear()), []
        saver = Saver(tmp_path)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
        for call in (lambda: saver.save(2, held), saver.wait):
            saver.save(1, held)
            said.append(words_of(call))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        saver.save(1, held)
        saver.save(2, held, own={1} if dist.get_rank() else None)
        said.append(words_of(lambda: saver.save(1, held)))
        saver.save(1, held)
        said.append(words_of(saver.wait))
        try:
            with saver:
                saver.save(2, held)
                raise ArithmeticError("of training")
        except ArithmeticError:
            return said, newest(tmp_path).name, saver.wait().name

    for said, last, waited in run(body, ranks=2):
        sentences = [*["rank-1-of-2.safetensors cannot be written"] * 2, "own= cannot be JSON", "is there already"]
        for words, sentence in zip(said, sentences, strict=True):
            assert sentence in (words or ""), words
        assert last == waited == "step-2"


def test_a_save_waits_for_no_other_rank(tmp_path):
    def body():
        with Saver(tmp_path) as saver:
            for rank in (0, 1):
                if dist.get_rank() == rank:
                    saver.save(1, Held(linear()))
                dist.barrier()
        return saver.wait().name

    assert run(body, ranks=2) == ["step-1"] * 2


class Whole:
    """The least that can be saved: tensors that a rank holds whole, by name."""

    def __init__(self, tensors):
        self.tensors = tensors

    def parts(self):
        return {name: Part(tuple(x.shape), x.dtype, {whole(x.shape): x}) for name, x in self.tensors.items()}

    def groups(self):
        return []


def test_what_several_ranks_hold_is_compared_in_the_copies(tmp_path):
    def body():
        said, a, b = [], torch.arange(4.0), torch.ones(4)
        with Saver(tmp_path) as saver:
            for step, more in enumerate((0, dist.get_rank(), 0)):
                a += more
                saver.save(step, Whole({"a": a, "b": b}))
                a -= more
                said.append(words_of(saver.wait))
        return said

    for first, second, third in run(body, ranks=2):
        assert first is third is None
        assert "'a' differs on ranks 0 and 1, which both hold it" in second


def test_a_saver_that_is_dropped_frees_its_copies_and_reports_errors(tmp_path, capfd):
    def body():
        before, held = threading.active_count(), Held(linear())
        for asked in (False, False, True):
            saver = Saver(tmp_path)
            saver.save(1, held)
            copy, writing = weakref.ref(next(iter(saver.copies.values()))), saver.writing
            if asked:
                assert "step-1 is there already" in words_of(saver.wait)
            del saver
            wait([writing])
            del writing
            deadline = time.monotonic() + 60
            while (copy() is not None or threading.active_count() > before) and time.monotonic() < deadline:
                gc.collect()  # an error and its traceback refer to each other
                time.sleep(0.01)
            assert copy() is None and threading.active_count() == before
        return newest(tmp_path).name

    assert run(body, ranks=2) == ["step-1"] * 2
    printed = capfd.readouterr().out
    for sentence in ("step-1 is there already", "RuntimeError: a checkpoint was not saved: end with Saver.wait()"):
        assert printed.count(sentence) == 2, printed


def test_a_tensor_that_became_two_is_saved_as_two(tmp_path):
    def of_buffers(a, b):
        model = linear()
        model.register_buffer("a", a)
        model.register_buffer("b", b)
        return model

    def body():
        shared, wrong = torch.zeros(2), []
        changed = of_buffers(shared, shared)
        tied, untied = (GPT(replace(CONFIG, tied=tied), seed=1) for tied in (True, False))
        with Saver(tmp_path) as saver:
            for step, model in enumerate((tied, untied, tied, changed, changed)):
                changed.b = torch.ones(2) if step == 4 else shared
                saver.save(step, held := Held(model))
                expected = numbers(held)
                other = Held(GPT(model.config) if model is not changed else of_buffers(torch.rand(2), torch.rand(2)))
                load(saver.wait(), other)
                wrong += [] if same(numbers(other), expected) else [step]
        return wrong

    for wrong in run(body, ranks=2):
        assert not wrong


def test_a_saver_frees_everything_when_its_with_ends(tmp_path):
    def taken(group):
        dist.barrier(group)  # the group has its threads and files now, whichever savers have ended
        return threading.active_count(), len(os.listdir("/dev/fd"))

    def one(folder, group, fail):
        with contextlib.suppress(ArithmeticError), Saver(folder, group) as saver:
            saver.save(1, Held(linear()))
            if fail:
                raise ArithmeticError("of training")
        copies = saver.copies
        return weakref.ref(saver), copies, words_of(lambda: saver.save(2, Held(linear()))), saver.wait().name

    def body():
        group, found = dist.new_group(backend="gloo"), []
        one(tmp_path / "first", None, False)
        before = taken(group)
        for case in ((None, False), (None, True), (group, False), (group, True)):
            saver, *rest = one(tmp_path / str(case[1]) / str(case[0] is None), *case)
            gc.collect()
            found.append((saver() is None, *rest))
        return found, before, taken(group)

    for found, before, after in run(body, ranks=2):
        for gone, copies, said, last in found:
            assert gone and not copies and last == "step-1"
            assert said == "this Saver has ended, with its `with`: save inside the `with`, or make another Saver"
        assert after == before


def test_a_rank_that_is_killed_while_its_thread_writes_leaves_the_last_checkpoint(tmp_path):
    def body(victim):
        with Saver(tmp_path) as saver:
            if victim is None:
                saver.save(1, Held(linear()))
                return saver.wait()
            if dist.get_rank() == victim:
                saving.flush = lambda path: os.kill(os.getpid(), signal.SIGKILL)
            saver.save(2, Held(linear(1)))

    run(body, None, ranks=2)
    for victim in (0, 1):
        with pytest.raises(RankError, match=f"rank {victim} "):
            run(body, victim, ranks=2)
        assert newest(tmp_path).name == "step-1"
    assert run(lambda: load(newest(tmp_path), Held(linear(1))), ranks=3)[0].step == 1


def test_a_job_that_ends_without_wait_leaves_nothing_that_hangs(tmp_path):
    def body():
        held_up("write")  # never set
        Saver(tmp_path).save(1, Held(linear()))

    try:
        run(body, ranks=2)
    except RankError as error:
        assert "returned without joining" in str(error)
    assert newest(tmp_path) is None


PROGRAM = """
import sys
import torch.distributed as dist
from labs.checkpoint import Held, Saver
from tests.checkpoint.common import linear
from tests.checkpoint.test_background import held_up
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
go, _ = held_up("write")
written, not_written = Saver(folder), Saver(f"{folder}/not")
for saver in (written, not_written):
    saver.save(1, Held(linear()))
dist.destroy_process_group(not_written.group)
go.set()
"""


def test_a_program_that_ends_without_wait_ends_after_the_write_and_reports_what_was_not_written(tmp_path):
    done = subprocess.run([warm.python(), "-c", PROGRAM, tmp_path], capture_output=True, text=True, check=True)
    assert "Saver.wait" in done.stderr and "ProcessGroup" in done.stderr, done.stderr
    assert newest(tmp_path).name == "step-1" and newest(tmp_path / "not") is None


def test_some_of_the_ranks_save_and_then_all_of_them(tmp_path):
    """Save on some of the ranks and then on all: after that, ranks count their groups differently."""

    def body():
        pair, found = dist.new_group([0, 2]), None
        if dist.get_rank() in (0, 2):
            with Saver(tmp_path, pair) as saver:
                saver.save(1, Held(linear()), own=dist.get_rank())
            found = load(saver.wait(), Held(linear(1)), pair).own
        with Saver(tmp_path) as saver:
            saver.save(2, Held(linear()), own=dist.get_rank())
        return found, load(saver.wait(), Held(linear(1))).own

    assert run(body, ranks=3) == [([0, 2], [0, 1, 2]), (None, [0, 1, 2]), ([0, 2], [0, 1, 2])]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies from a GPU need one")
def test_a_copy_from_a_gpu_is_pinned(tmp_path):
    def body():
        model = linear().cuda()
        with Saver(tmp_path) as saver:
            saver.save(1, Held(model))
            expected = model.weight.cpu()
            with torch.no_grad():
                model.weight.zero_()
            load(saver.wait(), Held(model))
            pinned = [x.is_pinned() for x in saver.copies.values()]
        return all(pinned) and torch.equal(model.weight.cpu(), expected)

    assert run(body, ranks=1) == [True]
