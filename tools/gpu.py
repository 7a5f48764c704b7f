"""The course on the GPUs of this machine: `make gpu`, at most ten minutes.

    make gpu                         every part of PARTS, one after the other
    make gpu ARGS="doctor tour"      these only

In every part a job uses CUDA and NCCL: with a GPU per rank if there are enough of them, else with ranks that share one.
However a part ends, the next one begins.  Each part has its own verdict:

    passed    it ended well
    failed    it did not: its output says why
    stopped   it ran past its limit, and was ended together with everything that it had started
    not run   there is no GPU

build/gpu/report.json and report.html list the verdicts, the machine and the output of each part.  They also say which
figures of the course, all of which were measured on CPUs, a part would add to.  The exit status is 0 if every part has
passed, else 1.
"""

import argparse
import contextlib
import datetime
import html
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "gpu"
GRACE = 10.0  # seconds in which a part that was asked to end may end its ranks


@dataclass(frozen=True)
class Part:
    """A command as `python ...` takes it, the seconds after which it is ended, and whether it needs a GPU."""

    name: str
    command: tuple[str, ...]
    limit: float
    fills: str
    needs_gpu: bool = True


PYTEST = ("-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider")
TOUR = ("--json", str(FOLDER / "tour.json"), "--figure", str(FOLDER / "tour.png"))
PARTS = (
    Part("doctor", ("-m", "labs", "doctor"), 30, "none: whether this machine can run the course", needs_gpu=False),
    Part(
        "contract",
        (*PYTEST, "tests/test_contract.py"),
        150,
        "numbers, bytes sent and bytes held of every strategy (gloo sends what NCCL does, by the same formulas)",
    ),
    Part(
        "tour",
        ("-m", "labs", "tour", "--strategies", "all", "--device", "cuda", *TOUR),
        120,
        "the four ledgers in the README and in notebook 00; ms per step",
    ),
    Part(
        "bench",
        ("-m", "bench", "--quick", "step", "zero", "tensor", "pipeline", "checkpoint", "record"),
        120,
        "the ratios of time in CONTRIBUTING and in notebooks 03 to 10; an asynchronous save behind real steps",
    ),
    Part(
        "notebooks",
        (*PYTEST, "--nbval-lax", "--nbval-cell-timeout", "120", "solutions"),
        170,
        "every time and every peak that a cell prints; what is exposed and what is hidden in 03, 06, 09 and 10",
    ),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one part: its verdict, how long it took (s), and its output."""

    name: str
    verdict: str
    seconds: float
    fills: str
    output: str


def outcome_of(part: Part, gpus: int) -> Outcome:
    """Run a part with `gpus` GPUs, in a session of its own, which ends as a whole."""
    if part.needs_gpu and gpus == 0:
        return Outcome(part.name, "not run", 0.0, part.fills, "there is no GPU")
    where = {"LABS_DEVICE": "cuda"} if gpus else {}
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *part.command],
        cwd=ROOT,
        env={**os.environ, **where},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=part.limit)
        verdict = "failed" if process.returncode else "passed"
    except subprocess.TimeoutExpired:
        verdict, output = "stopped", end(process)
    except BaseException:
        end(process)
        raise
    return Outcome(part.name, verdict, time.perf_counter() - begin, part.fills, output)


def end(process: subprocess.Popen[str]) -> str:
    """End the process's whole session, gently first, and return its output."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=GRACE)[0]
    raise RuntimeError(f"process {process.pid} does not end, and holds its output open")


def machine() -> dict[str, object]:
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "GPUs": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def page(of: dict[str, object], outcomes: Sequence[Outcome]) -> str:
    """Return the report for a browser: a line per part, with its output folded."""
    facts = "; ".join(f"{name}: {html.escape(str(value))}" for name, value in of.items())
    parts = "\n".join(
        f"<details><summary><b>{each.name}</b>: {each.verdict} after {each.seconds:.0f} s. Figures that it would fill: "
        f"{html.escape(each.fills)}</summary><pre>{html.escape(each.output)}</pre></details>"
        for each in outcomes
    )
    return f"<!doctype html><meta charset=utf-8><title>The course on GPUs</title>\n<p>{facts}</p>\n{parts}\n"


def report(parts: Sequence[Part], folder: Path, gpus: int) -> int:
    """Run the parts and write the report after each, so that it survives if the next part takes the machine down."""
    folder.mkdir(parents=True, exist_ok=True)
    of, outcomes = machine(), []
    for part in parts:
        print(f"{part.name:<10} at most {part.limit:.0f} s ...", flush=True)
        outcomes.append(outcome := outcome_of(part, gpus))
        print(f"{'':<10} {outcome.verdict} after {outcome.seconds:.0f} s", flush=True)
        if outcome.verdict in ("failed", "stopped"):
            print(*outcome.output.splitlines()[-5:], sep="\n", flush=True)
        content = {"schema": 1, "machine": of, "parts": [asdict(each) for each in outcomes]}
        (folder / "report.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        (folder / "report.html").write_text(page(of, outcomes))
    print(f"Saved: {folder / 'report.json'}, {folder / 'report.html'}")
    return int(any(each.verdict != "passed" for each in outcomes))


def main(arguments: Sequence[str]) -> int:
    options = argparse.ArgumentParser(prog="python -m tools.gpu", description=__doc__.splitlines()[0])
    options.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(p.name for p in PARTS)} (all)")
    names = options.parse_args(arguments).parts
    if unknown := set(names) - {part.name for part in PARTS}:
        options.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(part.name for part in PARTS)}")
    gpus = torch.cuda.device_count()
    if gpus == 0:
        print("There is no GPU here that PyTorch can use: only doctor runs, and says what it sees.")
    return report([part for part in PARTS if not names or part.name in names], FOLDER, gpus)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
