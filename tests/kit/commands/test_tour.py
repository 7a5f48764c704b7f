"""Tests of the tour as a command: its output, its file, its errors, and its failures.

The contract test checks its figures.  Here we check the promises to a reader: one table that fits a terminal; a file
with a fixed schema; one sentence for everything that cannot be done; and a failure, with its reason, if a strategy
differs from the table.
"""

import json
import os
import pty
import re
import subprocess
import termios
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from labs import ddp
from labs.cost import HeldBytes, Prediction
from labs.kit.commands import tour
from labs.kit.launch import RankError
from labs.kit.training.strategies import COMPILED, ONE_DEVICE, STRATEGIES, WITH_AN_EXTRA, average_with
from tests.depth import deepen
from tools import warm

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["P", "G", "S", "A", "comm", "temporary", "peak"]


# ---- a whole tour ----------------------------------------------------------------------------------------


def read_all(descriptor: int) -> str:
    """Return everything that comes through a pseudo-terminal."""
    content = b""
    while True:
        try:
            piece = os.read(descriptor, 1 << 16)
        except OSError:  # Linux raises this when the other end is closed
            piece = b""
        if not piece:
            os.close(descriptor)
            return content.decode()
        content += piece


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run a tour from a shell: (folder, stdout through a pipe, stderr on a terminal)."""
    folder = tmp_path_factory.mktemp("tour")
    options = "tour --steps 3 --batch 2 --ranks 2 --strategies torch-ddp,ddp-bucketed"
    command = [warm.python(), "-m", "labs", *options.split()]
    mine, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=theirs) as job:
        os.close(theirs)
        progress = read_all(mine)
        out = job.stdout.read().decode()
    assert job.returncode == 0, out + progress
    return folder, out, progress


def test_output_is_clean_in_a_pipe_and_fits_a_terminal(made):
    _, out, _ = made
    assert "\r" not in out and "\x1b" not in out
    assert max(len(line) for line in out.splitlines()) <= 100
    names = re.findall(r"^(one device|[\w-]*ddp[\w-]*) +\d", out, re.MULTILINE)
    assert names == ["one device", "ddp-bucketed", "torch-ddp"]
    assert out.count("predicted") == out.count("measured") == 3
    assert "not yet below the corpus's unigram entropy" in out
    assert "to the byte" in out


def test_progress_is_shown_on_a_terminal(made):
    *_, progress = made
    assert progress.count("\r") > 3
    assert re.search(r"one device .* 2/9 .*ddp-bucketed .* 5/9 .*torch-ddp .* 8/9 ", progress, re.DOTALL)


def test_each_row_is_printed_as_soon_as_it_is_measured(made):
    _, out, _ = made
    printed = re.findall(
        r"^(\S.*\S): \d+\.\d ms per step(, parameters \de-\d\d from one process's)?$", out, re.MULTILINE
    )
    assert [(name, bool(rest)) for name, rest in printed] == [
        ("one device", False),
        ("ddp-bucketed", True),
        ("torch-ddp", True),
    ]


def test_one_of_each_kind_are_taken_unless_others_are_named():
    names = [[row.name for row in tour.choose(asked, 4)] for asked in (None, "all", " fsdp,ddp-naive")]
    everything = [row.name for row in (*STRATEGIES, *WITH_AN_EXTRA, *COMPILED) if row.fits(4)]
    assert names == [list(tour.ONE_OF_EACH), everything, ["ddp-naive", "fsdp"]]
    assert [row.name for row in tour.choose(None, 1)] == [
        row.name for row in STRATEGIES if row.name in tour.ONE_OF_EACH and row.fits(1)
    ]


def test_a_model_with_experts_has_strategies_of_its_own_and_bytes_for_the_loads_that_were_counted(monkeypatch):
    monkeypatch.setattr(tour, "WATCHED", 2)
    chosen = tour.choose(None, 2, "tiny-moe")
    assert [row.name for row in chosen] == ["ep", "fsdp-ep", "torch-ep"]
    one, ep = tour.tour(tour.TourSettings("tiny-moe", ranks=2, steps=2, batch=2), chosen[:1])
    assert one.differs == ep.differs == [] and ep.sent["measured"] > 0
    with pytest.raises(ValueError, match="no strategy 'fsdp': choose from ep, fsdp-ep, torch-ep, or all"):
        tour.choose("fsdp", 2, "tiny-moe")


def test_files_have_the_schema_and_nothing_else_is_left(made):
    folder, _, _ = made
    assert sorted(path.name for path in folder.iterdir()) == ["tour.json", "tour.png"]
    assert (folder / "tour.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((folder / "tour.json").read_text())
    assert list(report) == ["schema", "config", "versions", "reference", "rows"]
    assert report["schema"] == 1
    assert report["config"]["ranks"] == 2 and report["config"]["steps"] == 3
    assert set(report["versions"]) >= {"python", "torch"}
    assert [(row["name"], row["side"], row["ranks"]) for row in report["rows"]] == [
        ("one device", "ours", 1),
        ("ddp-bucketed", "ours", 2),
        ("torch-ddp", "native", 2),
    ]
    assert report["rows"][0]["losses"] == report["reference"]["losses"]
    for row in report["rows"]:
        assert list(row) == [
            "name",
            "side",
            "ranks",
            "losses",
            "max_param_diff",
            "sent",
            "held",
            "ms_per_step",
            "note",
            "mesh",
            "same",
        ]
        assert row["losses"] == pytest.approx(report["reference"]["losses"], abs=1e-5)
        assert len(row["losses"]) == 3 and row["max_param_diff"] <= 1e-5 and row["ms_per_step"] > 0
        assert list(row["held"]) == KINDS
        for kind, pair in {"sent": row["sent"], **row["held"]}.items():
            assert list(pair) == ["predicted", "measured"]
            nobody = kind == "temporary" or (row["side"] == "native" and kind in ("A", "comm", "peak"))
            assert [type(value) for value in pair.values()] == [type(None) if nobody else int, int]
    sent = [row["sent"]["measured"] for row in report["rows"]]
    assert sent[0] == 0 and sent[1] == sent[2] == report["rows"][1]["held"]["P"]["measured"]  # 2 (N-1)/N, with N = 2


def test_the_loss_falls_below_the_unigram_entropy():
    plan = tour.TourSettings(ranks=1)
    rows = list(tour.tour(plan, []))
    assert rows[0].final_loss < plan.corpus.unigram_entropy() - 0.2
    assert "is below the corpus's unigram entropy" in tour.verdicts(rows, plan)[0]
    assert rows[0].differs == []


# ---- strategies that differ from the table ---------------------------------------------------------------


class SendsTwice(ddp.Bucketed):
    """A strategy with one more collective, whose result nobody uses."""

    def average(self):
        super().average()
        self.all_reduce(next(iter(self.trainable.values())).grad.clone())


class Sums(ddp.Bucketed):
    """A strategy that does not divide: torch.optim.AdamW hardly changes, but the numbers differ from one process's."""

    def average(self):
        self.ranks = 1
        super().average()


@pytest.mark.parametrize("extras", [False, *deepen(True)], ids=["alone", "beside those of an extra"])
def test_a_strategy_that_differs_fails_the_tour(extras, monkeypatch, capsys, tmp_path):
    broken = {"sends-twice": SendsTwice, "sums": Sums}
    rows = [replace(STRATEGIES[1], name=name, apply=partial(average_with, each)) for name, each in broken.items()]
    monkeypatch.setattr(tour, "STRATEGIES", rows)
    if not extras:
        monkeypatch.setattr(tour, "WITH_AN_EXTRA", ())
        monkeypatch.setattr(tour, "COMPILED", ())
    monkeypatch.chdir(tmp_path)
    assert tour.main(["--steps", "2", "--batch", "2", "--ranks", "2", "--strategies", "all"]) == 1
    out, printed = capsys.readouterr()
    sends, sums = printed.splitlines()
    assert sends == "tour: sends-twice, rank 0, 1: sent 887,040 bytes in a step, not the predicted 821,504"
    assert re.fullmatch(
        r"tour: sums, rank 0, 1: parameters differ from one process's by \d\.\de-\d\d, more than 1e-05", sums
    )
    assert "to the byte" not in out
    assert (tmp_path / "tour.json").exists()  # the file stays for inspection


HELD = HeldBytes(P=8, G=8, S=16, A=99, comm=0, temporary=5, peak=130)
PREDICTED = Prediction(sent=12, collectives={"all_reduce": 1}, textbook=12, held=HELD)
MEASURED = vars(HELD)


@pytest.mark.parametrize(
    ("difference", "sent", "held", "fault"),
    [
        (1e-6, 12, {"A": 90, "comm": 9, "temporary": 9, "peak": 140}, None),
        (2e-5, 12, {}, "parameters differ from one process's by 2.0e-05, more than 1e-05"),
        (float("nan"), 12, {}, "parameters differ from one process's by nan, more than 1e-05"),
        (0.0, 13, {}, "sent 13 bytes in a step, not the predicted 12"),
        (0.0, 12, {"P": 9}, "held 9 bytes of parameters, not the predicted 8"),
        (0.0, 12, {"G": 7}, "held 7 bytes of gradients, not the predicted 8"),
        (0.0, 12, {"S": 0}, "held 0 bytes of optimizer state, not the predicted 16"),
    ],
)
def test_what_counts_as_a_fault(difference, sent, held, fault):
    found = list(tour.faults_of(difference, PREDICTED, sent, MEASURED | held))
    assert found == ([fault] if fault else [])


def test_a_kind_that_differs_from_its_prediction_is_named():
    held = {kind: {"predicted": n, "measured": n} for kind, n in MEASURED.items()}
    row = tour.Row("mine", "ours", 2, [3.0], 0.0, {"predicted": 12, "measured": 12}, held, 1.0)
    assert tour.off(row) == ""
    row.held["A"] = {"predicted": None, "measured": 7}
    row.held["peak"] = {"predicted": 3_442_252, "measured": 3_160_336}
    assert tour.off(row) == "mine held, in bytes: peak 3,160,336 (predicted 3,442,252)."


# ---- bad input, in one sentence and before any training --------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--ranks", "5"],
            "batch 12 is not divisible by 5 ranks: take --batch 15, or --ranks with one of 1, 2, 3",
        ),
        (["--ranks", "0"], "ranks 0: a job has 1 to 64 ranks"),
        (["--ranks", "65"], "ranks 65: a job has 1 to 64 ranks"),
        (["--steps", "0"], "steps 0 and batch 12 must each be at least 1"),
        (["--batch", "0"], "steps 30 and batch 0 must each be at least 1"),
        (["--size", "huge"], "size 'huge' is no model whose tokens are bytes: take tiny or small or medium"),
        (["--size", "llama3-8b"], "size 'llama3-8b' is no model"),
        (
            ["--strategies", "ddp-naive,fsdq"],
            "no strategy 'fsdq': choose from ddp-naive, ddp-bucketed, ddp-overlapped, torch",
        ),
        (["--strategies", ""], "no strategy ''"),
        (["--device", "tpu"], "device='tpu': give"),
        (["--json", "not/there/tour.json"], "not/there/tour.json cannot be written (no such file or directory)"),
        (["--figure", "."], ". cannot be written (it is a folder)"),
    ],
)
def test_bad_input_is_reported_before_any_training(arguments, said, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tour, "run", lambda *_, **__: pytest.fail("it began to train"))
    monkeypatch.chdir(tmp_path)
    assert tour.main(arguments) == 2
    out, printed = capsys.readouterr()
    assert printed.startswith("tour: ") and said in printed and printed.count("\n") == 1
    assert out == "" and list(tmp_path.iterdir()) == []


def test_cuda_without_a_gpu_is_reported(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert tour.main(["--device", "cuda"]) == 2
    assert "PyTorch sees no NVIDIA GPU here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RankError("died", (1,), "rank 1 was killed by SIGKILL", []), 2, "tour: rank 1 was killed by SIGKILL"),
        (KeyboardInterrupt(), 130, "tour: stopped"),
    ],
)
def test_a_job_that_fails_is_reported_without_a_traceback(error, code, said, monkeypatch, capsys, tmp_path):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(tour, "run", fails)
    monkeypatch.chdir(tmp_path)
    assert tour.main([]) == code
    assert capsys.readouterr().err == said + "\n"
    assert list(tmp_path.iterdir()) == []


# ---- small parts -----------------------------------------------------------------------------------------


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "tour.json"
    tour.write(path, b"first")
    with pytest.raises(TypeError):
        tour.write(path, None)
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_auto_is_decided_once_for_reference_and_strategies(monkeypatch):
    monkeypatch.delenv("LABS_DEVICE")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert tour.TourSettings(ranks=4).device == "cpu"
    assert tour.TourSettings(ranks=1).device == "cuda"
    assert tour.TourSettings(ranks=4, device="cuda").device == "cuda"


def test_batches_are_the_same_text_for_any_number_of_ranks():
    plan = tour.TourSettings()
    ((x, y),) = plan.batches(1, steps=1)[0]
    inputs, targets = zip(*(part[0] for part in plan.batches(4, steps=1)), strict=True)
    assert torch.equal(torch.cat(inputs), x) and torch.equal(torch.cat(targets), y)


@pytest.mark.parametrize(
    ("largest", "unit"), [(900, "  B/rank"), (900_000, "KiB/rank"), (4e8, "MiB/rank"), (4e11, "GiB/rank")]
)
def test_the_table_takes_the_unit_that_fits(largest, unit):
    pair = {"predicted": 0, "measured": int(largest)}
    row = tour.Row("ddp-overlapped", "native", 64, [5.5, 4.5], 1e-6, pair, dict.fromkeys(KINDS, pair), 1234.5)
    shown = repr(tour.show([row]))
    assert unit.strip() in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_names_are_unique_and_sides_known():
    rows = (ONE_DEVICE, *STRATEGIES, *WITH_AN_EXTRA, *COMPILED)
    assert len({row.name for row in rows}) == len(rows)
    assert {row.side for row in rows} == {"ours", "native"}
    others = ("torch-", "deepspeed-", "gspmd-")
    assert all(row.name.startswith(others) == (row.side == "native") for row in rows)
