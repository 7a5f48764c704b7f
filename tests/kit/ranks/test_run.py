"""Tests of the launcher: values, output, and calls that are refused.

ranks/test_diagnosis.py tests the errors of failing jobs, ranks/test_forkserver.py what they leave behind.
"""

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tqdm import tqdm

from labs.fsdp import fully_shard
from labs.kit.launch import RankError, run
from labs.kit.ranks import flight_recorder, torchrun
from labs.kit.ranks.team import Team
from labs.kit.watch import c10d_tap
from labs.mesh import Mesh
from tests.kit.ranks.jobs import gone_within


@pytest.fixture(scope="module", autouse=True)
def warm():
    run(dist.get_rank, ranks=2)


# ---- a job is a function call with a value ---------------------------------------------------------------


def test_every_rank_returns_its_value():
    assert run(lambda k: dist.get_rank() * k, 10, ranks=3) == [0, 10, 20]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_the_ranks_talk(ranks):
    def job():
        x = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(x)
        return x.item(), os.getpid(), dist.get_world_size()

    values = run(job, ranks=ranks)
    assert {v[0] for v in values} == {ranks * (ranks + 1) / 2}
    assert len({v[1] for v in values} | {os.getpid()}) == ranks + 1, "each rank is a process of its own"


def test_keyword_arguments_and_environment_reach_the_ranks(monkeypatch):
    monkeypatch.setenv("COURSE_WORD", "shard")
    assert run(lambda *, word: os.environ["COURSE_WORD"] + word, word="s", ranks=2) == ["shards", "shards"]


def test_a_model_travels_both_ways():
    model = torch.nn.Linear(3, 2)
    back = run(lambda m: m, model, ranks=2)
    assert all(torch.equal(b.weight, model.weight) for b in back)


def test_output_arrives_live_and_prefixed(capsys):
    arrived = {}

    class Watch:
        def write(self, text):
            arrived.setdefault(text, time.monotonic())

        def flush(self):
            pass

    def talk():
        print(f"hello from {dist.get_rank()}")
        time.sleep(0.6)

    real, sys.stdout = sys.stdout, Watch()
    try:
        run(talk, ranks=2)
    finally:
        sys.stdout = real
    done = time.monotonic()
    message = "".join(arrived)
    assert "[rank 0] hello from 0\n" in message and "[rank 1] hello from 1\n" in message
    assert done - min(arrived.values()) > 0.4, "the lines came while the ranks still ran"


def test_a_progress_bar_works_on_rank_0(capsys):
    def bar():
        if dist.get_rank() == 0:
            for _ in tqdm(range(5), mininterval=0, ascii=True):
                time.sleep(0.02)

    run(bar, ranks=2)
    out = capsys.readouterr().out
    assert "\r[rank 0]" in out and "5/5" in out and "[rank 1]" not in out


def test_a_warning_appears_once():
    def careful():
        warnings.warn("mind the gap", stacklevel=1)

    with pytest.warns(UserWarning, match="mind the gap") as seen:
        run(careful, ranks=4)
    assert len(seen) == 1


def test_megabytes_of_output_are_cut_with_a_word(capsys):
    def shout():
        if dist.get_rank() == 1:
            for _ in range(30_000):
                print("x" * 99)

    run(shout, ranks=2)
    out = capsys.readouterr().out
    assert len(out) < 1.5 * 2**20
    assert "[rank 1] 1 MiB printed: only the end of the rest is shown" in out


# ---- good programs that look odd -------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor(i)


def test_a_data_loader_with_workers():
    def job():
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2)
        return sum(batch.sum().item() for batch in loader)

    assert run(job, ranks=2) == [28, 28]


def test_what_a_rank_has_forked_ends_with_it():
    def job():
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        return child

    assert gone_within(run(job, ranks=2), 2)


def test_a_receive_from_anyone_takes_a_message_meant_for_no_other():
    def job():
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1)
            dist.send(torch.ones(4), 1)
        else:
            x = torch.zeros(4)
            dist.recv(x[:2])
            dist.recv(x, 0)
            return x.sum().item()

    assert run(job, ranks=2)[1] == 4


def test_a_second_thread_may_still_call_what_the_others_wait_for():
    def job():
        a, b = dist.new_group([0, 1]), dist.new_group([0, 1])

        def later():
            time.sleep(1.2)
            dist.all_reduce(torch.ones(1), group=b)

        thread = threading.Thread(target=later)
        if dist.get_rank() == 0:
            thread.start()
        else:
            dist.all_reduce(torch.ones(1), group=b)
        dist.all_reduce(torch.ones(1), group=a)
        if dist.get_rank() == 0:
            thread.join()
        return "done"

    assert run(job, ranks=2) == ["done", "done"]


def test_a_wait_that_gave_up_is_no_wait():
    def job():
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError):
                dist.irecv(torch.zeros(1), 1).wait(timedelta(milliseconds=50))
        else:
            time.sleep(0.3)
        return True

    def slow_and_sure():
        value = job()
        if dist.get_rank() == 0:
            time.sleep(0.5)
        return value

    assert run(slow_and_sure, ranks=2) == [True, True]


def test_more_shapes_than_the_flight_recorder_has_room_for(monkeypatch):
    """Check that shapes are no longer reported, but no message is confused with another."""

    def job():
        flight_recorder.TEXT = flight_recorder.GROUP_TEXT  # no room at all
        c10d_tap.listeners[0].text.__func__.__defaults__ = ("", 0)
        rank, x = dist.get_rank(), torch.ones(9)
        group = dist.new_group([0, 1])
        for size in range(1, 9):
            dist.all_reduce(x[:size], group=group)
            for source in range(2):
                (dist.send if rank == source else dist.recv)(x[: size + source], 1 - rank)
        return True

    assert run(job, ranks=2) == [True, True]


def test_a_warning_of_a_class_that_the_caller_has_not():
    def job():
        name = "only_in_the_rank"
        module = sys.modules[name] = type(sys)(name)
        exec("class Odd(UserWarning): pass", module.__dict__)
        sys.modules[name].__spec__ = None
        warnings.warn("odd one", module.Odd, stacklevel=1)

    with pytest.warns(UserWarning, match="odd one") as seen:
        run(job, ranks=2)
    assert len(seen) == 1


@pytest.mark.parametrize("end", [lambda: os.close(1), lambda: sys.stdout.close()])
def test_a_function_may_close_its_output(end, capsys):
    assert run(end, ranks=2) == [None, None]
    assert capsys.readouterr().out == ""


def test_output_that_the_callers_terminal_cannot_show():
    real, sys.stdout = sys.stdout, io.TextIOWrapper(io.BytesIO(), "ascii")
    try:
        run(lambda: print("é"), ranks=1)
        assert sys.stdout.buffer.getvalue() == b"[rank 0] \\xe9\n"
    finally:
        sys.stdout = real


def test_a_timeout_of_infinity():
    assert run(dist.get_rank, ranks=2, timeout=float("inf")) == [0, 1]


# ---- restarts --------------------------------------------------------------------------------------------


def test_ranks_of_which_one_died_or_raised_are_all_started_again(tmp_path, capsys):
    def job(done, *, folder):
        rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        (folder / f"{attempt}-{rank}").write_text(str(os.getpid()))
        assert done == []
        done.append(attempt)
        for _ in range(3 - attempt):
            dist.barrier()
        if attempt == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 1 and rank == 0:
            raise ValueError("no batch left\nat all")
        dist.all_reduce(torch.ones(1))
        return done

    results = run(job, [], folder=tmp_path, ranks=2, restarts=3, record="communication", tell="stage 2")
    assert results == [[2], [2]] and results.restarts == 2
    assert sorted(event.op for event in results.recording.events) == [*["all_reduce"] * 2, *["barrier"] * 2]
    assert re.sub(r"\d+ s\n", "? s\n", capsys.readouterr().out) == (
        "stage 2, 2 ranks … ? s\n"
        "rank 1 died of SIGKILL (if nobody did that, the machine ran out of memory); "
        "all ranks are started again (1 of 3)\n"
        "stage 2, 2 ranks … ? s\n"
        "rank 0 of 2 failed: ValueError: no batch left; all ranks are started again (2 of 3)\n"
        "stage 2, 2 ranks … ? s\n"
    )
    pids = {int(file.read_text()) for file in tmp_path.iterdir()}
    assert len(pids) == 6 and gone_within(pids, 2)


def started(error, monkeypatch, **options):
    """Return how often the ranks of a job are started if the caller only ever gets this error."""
    attempts = []

    class Fails(Team):
        def start(self):
            attempts.append(self.restarted)

        def finish(self):
            raise error

    monkeypatch.setattr("labs.kit.ranks.run.Team", Fails)
    with pytest.raises(type(error)):
        run(print, ranks=2, **options)
    return attempts


def test_after_so_many_restarts_it_is_an_error_as_always(monkeypatch, capsys):
    error = RankError("died", (1,), "x" * 9999 + "\nwhere it stood", [])
    assert started(error, monkeypatch) == [0] and capsys.readouterr().out == ""
    assert started(error, monkeypatch, restarts=2) == [0, 1, 2]
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("x; all ranks are started again (1 of 2)") and len(second) < 400


@pytest.mark.parametrize("kind", ["mismatch", "nobody", "returned", "deadlock", "timeout"])
def test_an_error_that_would_recur_is_raised_at_once(kind, monkeypatch, capsys):
    assert started(RankError(kind, (1,), "rank 1 is late", []), monkeypatch, restarts=2) == [0]
    assert capsys.readouterr().out == ""


def test_an_interrupt_is_never_followed_by_another_start(monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(RankError, match="rank 0 of 1 failed: KeyboardInterrupt") as caught:
        run(interrupted, ranks=1, restarts=1)
    assert caught.value.kind == "interrupted"
    assert started(KeyboardInterrupt(), monkeypatch, restarts=2) == [0]


def test_under_torchrun_it_is_torchrun_that_restarts(monkeypatch):
    for name in ("TORCHELASTIC_RUN_ID", *torchrun.GIVEN):
        monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match="restarts=3, but it is torchrun that restarts, at most 2 times"):
        run(print, restarts=3)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RuntimeError, match=r"the addresses of those that died .*: give it TORCH_DISABLE_SHARE"):
        run(print)


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarts", [-1, 1.0, True, None])
def test_a_number_of_restarts_that_cannot_be(restarts):
    with pytest.raises(ValueError, match=f"restarts={restarts!r}: give the number of times to start all ranks"):
        run(print, restarts=restarts)


@pytest.mark.parametrize("ranks", [0, -1, 65, 2.0, True])
def test_a_number_of_ranks_that_cannot_be(ranks):
    with pytest.raises(ValueError, match=f"ranks={ranks!r}: a job has 1 to 64 ranks"):
        run(print, ranks=ranks)


def test_an_unknown_device_and_a_missing_gpu():
    with pytest.raises(ValueError, match="device='tpu': give"):
        run(print, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="sees no NVIDIA GPU"):
            run(print, device="cuda")


def test_an_unknown_record_and_a_timeout_of_zero():
    with pytest.raises(ValueError, match="record='bytes'"):
        run(print, record="bytes")
    with pytest.raises(ValueError, match="timeout=0"):
        run(print, timeout=0)


def test_a_value_in_place_of_the_function():
    with pytest.raises(TypeError, match=r"run\(\) calls its first argument on every rank; 3 is not a function"):
        run(3)


def test_a_working_directory_that_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(RuntimeError, match="the working directory has been deleted"):
        run(print, ranks=2)


def test_a_variable_that_cannot_be_sent_is_named():
    lock = threading.Lock()

    def job():
        with lock:
            pass

    with pytest.raises(TypeError, match=r"variable 'lock' \(lock\) of job cannot be sent"):
        run(job, ranks=2)


config = {"dim": 64}  # torch.distributed has a module of this name, which cannot be pickled by value


def test_a_variable_named_like_a_module_of_torch_can_be_sent():
    assert run(lambda: (dist.get_rank(), config["dim"]), ranks=2) == [(0, 64), (1, 64)]


def test_a_value_that_cannot_come_back_is_reported():
    with pytest.raises(RankError, match=r"the value that it returned \(lock\) cannot be sent to the caller"):
        run(threading.Lock, ranks=2)


def test_a_value_with_a_process_group_is_reported_with_the_way_out():
    def job():
        torch.manual_seed(0)
        return fully_shard(torch.nn.Linear(2, 2))

    for fn in (job, partial(Mesh, (2,), ("dp",)), partial(dist.new_group, [0, 1])):
        with pytest.raises(RankError, match=r"it returned .* cannot be sent to the caller: .*full_tensor\(\)"):
            run(fn, ranks=2)


class Plain:
    """A standard output that can only be written to."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


def test_a_standard_output_that_is_none_or_cannot_be_flushed(monkeypatch):
    for stdout in (None, Plain()):
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run(print, "hello", ranks=1, tell="here") == [None]
    assert stdout.text.startswith("here, 1 rank … [rank 0] hello\n")


def test_where_all_warnings_are_errors_from_the_start_ranks_start():
    """Check the start although PyTorch itself warns when the process that forks imports it."""
    code = "from labs.kit.launch import run; print(run(__import__('os').getenv, 'PYTHONWARNINGS', ranks=1))"
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "['error']\n", done.stderr


class Awkward:
    """A value that asks the process to end when a rank packs it, or when the caller unpacks it."""

    def __init__(self, when):
        self.when = when

    def __reduce__(self):
        return sys.exit(4) if self.when == "packed" else (sys.exit, (5,))


@pytest.mark.parametrize(
    ("when", "message"),
    [("packed", r"\(Awkward\) cannot be sent to the caller: 4"), ("built", "cannot be read here: 5")],
)
def test_a_value_that_asks_to_exit_ends_neither_side_without_a_word(when, message):
    with pytest.raises(RankError, match=message):
        run(Awkward, when, ranks=1)


def test_a_rank_that_leaves_its_group_is_named_and_not_the_ranks_it_left():
    def job():
        dist.barrier()  # both are connected now
        if dist.get_rank() == 1:
            dist.destroy_process_group()
        else:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match="rank 1 returned without joining collective number 2 of all ranks, all_reduce"):
        run(job, ranks=2)


@pytest.mark.parametrize("code", [0, 3])
def test_exit_is_reported(code):
    with pytest.raises(RankError, match=rf"the function called exit\({code}\): let it return instead"):
        run(lambda: sys.exit(code), ranks=2)


def test_a_job_inside_a_job_is_refused():
    def job():
        from labs.kit.launch import run as inner

        inner(print)

    with pytest.raises(RankError, match="a job cannot start another job"):
        run(job, ranks=1)


def test_a_job_tells_what_it_is_while_it_runs(capsys):
    def body():
        if dist.get_rank() == 1:
            raise ValueError("no batch left")

    run(time.sleep, 0.01, ranks=1, tell="a nap")
    with pytest.raises(RankError):
        run(body, ranks=2, tell="stage 2")
    message = re.sub(r"\d+ s\n", "? s\n", capsys.readouterr().out)
    assert message == "a nap, 1 rank … ? s\nstage 2, 2 ranks … ? s\n"
