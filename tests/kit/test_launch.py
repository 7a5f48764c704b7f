"""The launcher: values, failures, hangs, and what is left behind.

Reference: each case plants one fault, in a known rank, operation and line; the error must name just these.
Times are the launcher's promises (a failure told in 1 s, a certain hang in 2 s), counted from the fault.
"""

import ctypes
import io
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
from tqdm import tqdm

from labs.kit.launch import RankError, run
from labs.kit.ranks import flight_recorder
from labs.kit.ranks.devices import devices_for
from labs.kit.ranks.flight_recorder import RING
from labs.kit.ranks.payload import pickled
from labs.kit.ranks.team import FORKSERVER, Team
from labs.kit.watch import tap

OPS = {
    "all_reduce": lambda x, g: dist.all_reduce(x, group=g),
    "broadcast": lambda x, g: dist.broadcast(x, first_of(g), group=g),
    "reduce": lambda x, g: dist.reduce(x, first_of(g), group=g),
    "all_gather": lambda x, g: dist.all_gather(
        [torch.empty_like(x) for _ in range(dist.get_world_size(g))], x, group=g
    ),
    "reduce_scatter": lambda x, g: dist.reduce_scatter(x.clone(), [x] * dist.get_world_size(g), group=g),
    "all_to_all": lambda x, g: dist.all_to_all_single(torch.empty_like(x), x, group=g),
    "gather": lambda x, g: dist.gather(
        x, [x.clone() for _ in range(dist.get_world_size(g))] if leads(g) else None, first_of(g), group=g
    ),
    "barrier": lambda x, g: dist.barrier(group=g),
}


def first_of(group):
    return dist.get_process_group_ranks(group)[0] if group else 0


def leads(group):
    return dist.get_rank() == first_of(group)


@pytest.fixture(scope="module", autouse=True)
def warm():
    run(dist.get_rank, ranks=2)


# ---- a job is a function call with a value ------------------------------------------------------


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
    told = "".join(arrived)
    assert "[rank 0] hello from 0\n" in told and "[rank 1] hello from 1\n" in told
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


# ---- twenty hangs and crashes --------------------------------------------------------------------


def go_wrong(op, members, culprit, fault):
    """All do three all_reduces; then `op` on the group of `members`, in which the rank `culprit` commits `fault`."""
    group = dist.new_group(members)
    other = dist.new_group([culprit, (culprit + 1) % 4] if fault == "other group" else [0, 1])
    x = torch.ones(12)
    for _ in range(3):
        dist.all_reduce(x)
    if dist.get_rank() not in members:
        return None
    if dist.get_rank() == culprit:
        if fault == "returns":
            return None
        if fault == "other shape":
            x = torch.ones(24)
        if fault == "other op":
            op = "all_gather" if op == "all_reduce" else "all_reduce"
        if fault == "other group":
            group = other
        if fault == "raises":
            raise KeyError("planted")
        if fault == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "SIGSEGV":
            ctypes.string_at(0)
        if fault == "exit code 5":
            os._exit(5)
        if fault == "loop":
            while True:
                time.sleep(0.01)  # planted loop
    OPS[op](x, group)
    return None


KIND = {"returns": "returned", "raises": "raised", "loop": "timeout", "other group": "deadlock"}
KIND |= {"other shape": "mismatch", "other op": "mismatch"}
KIND |= {"SIGKILL": "died", "SIGSEGV": "died", "exit code 5": "died"}


def twenty_cases():
    dice = random.Random(20)
    faults = ["returns"] * 4 + ["other shape"] * 4 + ["other op"] * 4 + ["other group"] * 2
    faults += ["raises", "raises", "SIGKILL", "SIGSEGV", "exit code 5", "loop"]
    for fault in faults:
        ops = ["all_reduce", "broadcast", "reduce", "all_gather"] if fault == "other shape" else list(OPS)
        members = (0, 1, 2, 3) if fault == "other group" else tuple(sorted(dice.sample(range(4), dice.choice([3, 4]))))
        yield dice.choice(ops), members, dice.choice(members), fault


@pytest.mark.parametrize(("op", "members", "culprit", "fault"), list(twenty_cases()))
def test_a_fault_is_told_by_rank_op_and_line(op, members, culprit, fault):
    """By what the ranks did, not by the clock: only the loop waits for the timeout.  `make bench` has the seconds."""
    with pytest.raises(RankError) as caught:
        run(go_wrong, op, list(members), culprit, fault, timeout=10 if fault == "loop" else 300)
    error = caught.value
    assert error.kind == KIND[fault]
    assert culprit in error.ranks
    if fault != "other group":
        assert error.ranks == (culprit,)
    where = {w.rank: w for w in error.where}
    assert sorted(where) == [0, 1, 2, 3]
    if fault == "raises":
        assert "KeyError: 'planted'" in str(error) and 'raise KeyError("planted")' in str(error)
    elif fault == "loop":
        assert "# planted loop" in where[culprit].site
    elif error.kind == "died":
        assert fault in str(error)
    if error.kind in ("mismatch", "returned", "deadlock", "timeout"):
        for rank in set(members) - {culprit}:
            assert where[rank].op == op, str(error)
            assert f'"{op}": lambda' in where[rank].site, str(error)


def test_a_mismatch_that_gloo_completes_silently_is_caught():
    """gloo's all_reduce of int32[2] with float32[2] ends without an error, with nonsense as its result."""

    def job():
        x = torch.ones(2, dtype=torch.int32 if dist.get_rank() else torch.float32)
        dist.all_reduce(x)
        return x

    with pytest.raises(RankError, match=r"rank 0 called all_reduce float32\[2\], rank 1 called all_reduce int32\[2\]"):
        run(job, ranks=2)


def test_a_ring_of_blocking_sends_is_told():
    def ring():
        rank, x = dist.get_rank(), torch.ones(1 << 20)
        dist.send(x, (rank + 1) % 3)
        dist.recv(x, (rank - 1) % 3)

    with pytest.raises(RankError, match="wait for each other: rank 0 in send") as caught:
        run(ring, ranks=3)
    assert caught.value.kind == "deadlock" and caught.value.ranks == (0, 1, 2)


def test_a_message_that_nobody_sends_is_told():
    def job():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(4), 1)

    with pytest.raises(RankError, match=r"rank 1 returned and will never answer recv float32\[4\] from 1"):
        run(job, ranks=2)


def test_a_rank_quicker_than_its_reader_is_no_failure():
    """Records are lost when a rank issues more of them than the ring holds between two looks."""

    def job(calls):
        x = torch.ones(0)
        for _ in range(calls):
            dist.all_reduce(x)
        dist.barrier()
        return calls

    assert run(job, 3 * RING // 2, ranks=2) == [3 * RING // 2] * 2


def test_the_first_cause_is_named_and_not_its_consequences():
    """Rank 2 fails before the others; they fail because it is gone, and earlier in the order of ranks."""

    def job():
        x = torch.ones(4)
        dist.all_reduce(x)
        if dist.get_rank() == 2:
            os._exit(7)
        dist.all_reduce(x)

    with pytest.raises(RankError, match="rank 2 ended with exit code 7") as caught:
        run(job)
    assert "ranks 0, 1 and 3 then had to stop" in str(caught.value)


def test_the_same_failure_on_all_ranks_is_told_once():
    def job():
        raise ValueError("no batch")

    with pytest.raises(RankError, match="ranks 0, 1 and 2 of 3 failed: ValueError: no batch") as caught:
        run(job, ranks=3)
    assert str(caught.value).count("Traceback") == 1


def test_a_failure_still_shows_what_was_printed_before_it(capsys):
    def job():
        print("without a newline", end="")
        raise ValueError("x")

    with pytest.raises(RankError):
        run(job, ranks=2)
    out = capsys.readouterr().out
    assert sorted(out.splitlines()) == [f"[rank {r}] without a newline" for r in range(2)]


# ---- good programs that look odd ----------------------------------------------------------------


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
    """Then the shapes are not told any more, but no message is taken for another."""

    def job():
        flight_recorder.TEXT = flight_recorder.GROUP_TEXT  # no room at all
        tap.listeners[0].text.__func__.__defaults__ = ("", 0)
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


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [0, -1, 65, 2.0, True])
def test_a_number_of_ranks_that_cannot_be(ranks):
    with pytest.raises(ValueError, match=f"ranks={ranks!r}: a job has 1 to 64 ranks"):
        run(print, ranks=ranks)


def test_an_unknown_device_and_a_missing_gpu():
    with pytest.raises(ValueError, match="device='tpu' is not one this course knows"):
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


def test_a_value_that_cannot_come_back_is_told():
    with pytest.raises(RankError, match=r"the value that it returned \(lock\) cannot be sent to the caller"):
        run(threading.Lock, ranks=2)


class Awkward:
    """A value that, as it is packed in a rank or built again in the caller, asks the process to end."""

    def __init__(self, when):
        self.when = when

    def __reduce__(self):
        return sys.exit(4) if self.when == "packed" else (sys.exit, (5,))


@pytest.mark.parametrize(
    ("when", "told"), [("packed", r"\(Awkward\) cannot be sent to the caller: 4"), ("built", "cannot be read here: 5")]
)
def test_a_value_that_asks_to_exit_ends_neither_side_without_a_word(when, told):
    with pytest.raises(RankError, match=told):
        run(Awkward, when, ranks=1)


def test_a_rank_that_leaves_its_group_is_told_and_not_whom_it_left():
    def job():
        dist.barrier()  # both are connected now
        if dist.get_rank() == 1:
            dist.destroy_process_group()
        else:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match="rank 1 returned without joining collective number 2 of all ranks, all_reduce"):
        run(job, ranks=2)


@pytest.mark.parametrize("code", [0, 3])
def test_exit_is_told(code):
    with pytest.raises(RankError, match=rf"the function called exit\({code}\): let it return instead"):
        run(lambda: sys.exit(code), ranks=2)


def test_a_job_inside_a_job_is_refused():
    def job():
        from labs.kit.launch import run as inner

        inner(print)

    with pytest.raises(RankError, match="a job cannot start another job"):
        run(job, ranks=1)


# ---- nothing is left behind ---------------------------------------------------------------------


def possessions():
    """What this process owns that a launch could leak, and the files of jobs in the folder of temporary files."""
    me = psutil.Process()
    files = os.listdir(tempfile.gettempdir())
    ranks = [p for p in psutil.Process(FORKSERVER.process.pid).children(recursive=True)]
    return me.num_fds(), me.num_threads(), len(ranks), len(files)


def come_back_to(before, seconds):
    deadline = time.monotonic() + seconds
    while possessions() != before and time.monotonic() < deadline:
        time.sleep(0.02)
    return possessions() == before


def soak_launches(times):
    def good():
        x = torch.ones(2)
        dist.all_reduce(x)
        return x[0].item()

    def bad():
        raise ValueError

    run(good, ranks=2)
    with pytest.raises(RankError):
        run(bad, ranks=2)
    before = possessions()
    for i in range(times):
        if i % 5 == 4:
            with pytest.raises(RankError):
                run((bad, dies, leaves)[i // 5 % 3], ranks=2)
        else:
            assert run(good, ranks=2) == [2.0, 2.0]
    assert possessions() == before


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves():
    if dist.get_rank() == 0:
        dist.barrier()


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """Temporary files of this test's jobs go here, and no others."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_launches_leave_nothing_behind(own_folder):
    soak_launches(20)


@pytest.mark.soak
def test_500_launches_leave_nothing_behind(own_folder):
    soak_launches(500)


def spurious(times):
    """Good jobs that end with DDP, where torch's own teardown aborts now and then: all must succeed."""

    def job():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        model(torch.ones(2, 4)).sum().backward()
        return dist.get_rank()

    for _ in range(times):
        assert run(job) == [0, 1, 2, 3]


def test_good_launches_never_fail():
    spurious(10)


@pytest.mark.soak
def test_1000_good_launches_never_fail():
    spurious(1000)


def script(body, **kwargs):
    code = "import os, sys, time\nimport torch.distributed as dist\nfrom labs.kit.launch import FORKSERVER, run\n"
    return subprocess.Popen([sys.executable, "-c", code + textwrap.dedent(body)], text=True, **kwargs)


HANG = """
    def job():
        print("pid", os.getpid())
        time.sleep(600)
    run(job)
"""


def pids_of(process):
    pids = []
    while len(pids) < 4:
        line = process.stdout.readline()
        assert line, "the script ended early"
        if "pid" in line:
            pids.append(int(line.split()[-1]))
    return pids


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone_within(pids, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(runs(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_when_the_caller_is_interrupted_or_killed_every_rank_is_gone(sign, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = script(HANG, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    with process:
        pids = pids_of(process)
        forkserver = psutil.Process(pids[0]).ppid()
        process.send_signal(sign)
        assert gone_within(pids, 20)
        process.wait(20)
    assert gone_within([forkserver], 20)
    left = [path.name for path in tmp_path.iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == [], "that one is PyTorch's own cache"


def test_an_interrupt_while_ranks_start_does_not_confuse_the_next_job(own_folder):
    """Stopped, the process that forks is as slow to answer as in its first two seconds."""
    forks = psutil.Process(FORKSERVER.process.pid)
    before = possessions()
    heard = threading.Event()

    def interrupt():
        """Again, if Python was in a finalizer, where it ignores what is raised."""
        seconds = 0.2
        while not heard.wait(seconds):
            os.kill(os.getpid(), signal.SIGINT)
            seconds = 10

    forks.suspend()
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            run(time.sleep, 60, ranks=2)
    finally:
        heard.set()
        forks.resume()
    with Team(devices_for("cpu", 2), pickled(os.getpid, (), {}), 2, 60, None) as team:
        assert [value for value, _ in team.finish()] == [team.pids[0], team.pids[1]]
    assert come_back_to(before, 2)


def test_a_second_interrupt_leaves_nothing_behind(own_folder, monkeypatch):
    run(dist.get_rank, ranks=2)
    before = possessions()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Team, "hear", interrupted)
        run(time.sleep, 60, ranks=2)
    assert come_back_to(before, 2)


def test_when_the_process_that_forks_is_killed_it_is_said_and_the_next_job_runs():
    threading.Timer(0.3, lambda: FORKSERVER.process.kill()).start()
    with pytest.raises(RankError, match="the process that starts ranks was killed"):
        run(time.sleep, 60, ranks=2)
    assert run(dist.get_rank, ranks=2) == [0, 1]


def side_by_side(jobs):
    body = """
    def job():
        import torch
        x = torch.ones(100)
        for _ in range(10):
            dist.all_reduce(x)
        return x[0].item()
    assert run(job, ranks=2) == [2.0**10] * 2
    """
    started = [script(body, stderr=subprocess.PIPE) for _ in range(jobs)]
    for process in started:
        _, err = process.communicate(timeout=600)
        assert process.returncode == 0, err


def test_launches_side_by_side_do_not_disturb_each_other():
    side_by_side(2)


@pytest.mark.soak
def test_thirty_launches_side_by_side():
    side_by_side(30)


def test_jobs_from_threads_of_one_process():
    answers = {}

    def one(k):
        answers[k] = run(lambda: k + dist.get_rank(), ranks=2)

    threads = [threading.Thread(target=one, args=(10 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {10 * k: [10 * k, 10 * k + 1] for k in range(4)}


def test_only_loopback_and_no_fixed_port():
    def job():
        dist.barrier()
        return [c.laddr for c in psutil.Process().net_connections() if c.status == "LISTEN"]

    listening = [address for value in run(job) for address in value]
    assert listening and {a.ip for a in listening} <= {"127.0.0.1", "::1"}
    assert len({a.port for a in listening}) == len(listening)


# ---- under torchrun -----------------------------------------------------------------------------


def test_under_torchrun_run_joins_the_world_that_is_there(tmp_path):
    file = tmp_path / "job.py"
    file.write_text(
        "import torch, torch.distributed as dist\n"
        "from labs.kit.launch import run\n"
        "def job():\n"
        "    x = torch.ones(1)\n"
        "    dist.all_reduce(x)\n"
        "    return dist.get_rank(), x.item()\n"
        "values = run(job)\n"
        "assert values == [(0, 2.0), (1, 2.0)], values\n"
        "try:\n"
        "    run(job, ranks=3)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(file)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert "ranks=3, but torchrun started 2" in done.stdout


def test_a_job_tells_what_it_is_while_it_runs(capsys):
    def body():
        if dist.get_rank() == 1:
            raise ValueError("no batch left")

    run(time.sleep, 0.01, ranks=1, tell="a nap")
    with pytest.raises(RankError):
        run(body, ranks=2, tell="stage 2")
    told = re.sub(r"\d+ s\n", "? s\n", capsys.readouterr().out)
    assert told == "a nap, 1 rank … ? s\nstage 2, 2 ranks … ? s\n"
