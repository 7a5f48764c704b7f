"""Tests that a warm Python starts, runs and ends as Python does, and that no notebook runs another's job again."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from labs.kit.launch import run
from tools import warm
from tools.warm import once
from tools.warm.once import Once

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a Python that forks others is warmed up on Linux only")
LONG = 300  # seconds after which a hang ends


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory):
    if warm.python() != sys.executable:  # the suite's own
        yield warm.python()
        return
    folder = tmp_path_factory.mktemp("w")
    with warm.pythons(folder):
        yield str(folder / "python")


def test_it_has_torch_and_is_otherwise_new(python: str, tmp_path: Path) -> None:
    code = "import os, sys; print('torch' in sys.modules, sys.argv, os.getcwd(), os.environ['X'], sys.stdin.read())"
    done = subprocess.run(
        [python, "-c", code + "; sys.exit(7)", "--a", "b"],
        cwd=tmp_path,
        env={**os.environ, "X": "set"},
        input="told",
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    # Triton, which CUDA builds of PyTorch 2.15 import, reports at the end of a process what gc.freeze() has kept.
    errors = re.sub(r"(?s)nanobind: leaked.*?refleaks\.html\n?", "", done.stderr)
    assert (done.stdout, errors, done.returncode) == (f"True ['-c', '--a', 'b'] {tmp_path} set told\n", "", 7)


def test_a_script_its_own_folder_and_the_same_python_again(python: str, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("name = 'beside'")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "away.py").write_text("name = 'away'")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, away, beside\nprint(__name__, __file__, beside.name, away.name, sys.executable)\n1 / 0"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path / "far"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([python, str(script)], env=environment, capture_output=True, text=True, timeout=LONG)
    assert done.stdout == f"__main__ {script} beside away {python}\n"
    assert "ZeroDivisionError" in done.stderr and "in <module>" in done.stderr
    assert done.returncode == 1


def test_a_module_and_its_open_files(python: str) -> None:
    done = subprocess.run([python, "-m", "json.tool"], input='{"a":1}', capture_output=True, text=True, timeout=LONG)
    assert done.stdout == '{\n    "a": 1\n}\n'
    read, write = os.pipe()
    subprocess.run([python, "-c", f"import os; os.write({write}, b'here')"], pass_fds=[write], check=True, timeout=LONG)
    os.close(write)
    with open(read, "rb") as pipe:
        assert pipe.read() == b"here"


def test_what_it_writes_unbuffered_is_there_at_once(python: str) -> None:
    code = "import os; print('torch' in os.sys.modules, end=''); os._exit(0)"
    assert subprocess.check_output([python, "-u", "-c", code], text=True, timeout=LONG) == "True"
    assert subprocess.check_output([python, "-c", code], text=True, timeout=LONG) == ""


def test_unknown_arguments_go_to_the_real_python(python: str) -> None:
    assert subprocess.check_output([python, "--version"], text=True, timeout=LONG).split()[1] == sys.version.split()[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_both(python: str, number: signal.Signals) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    client = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    process = psutil.Process(int(client.stdout.readline()))
    assert process.pid != client.pid
    client.send_signal(number)
    assert client.wait(LONG) == -number
    process.wait(LONG)
    client.stdout.close()


def test_a_job_is_run_once_in_all_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    (tmp_path / "jobs").mkdir()

    def job(adds: str, says: str = "", kind: type = str) -> str:
        with runs.open("a") as file:
            file.write(adds)
        print(says, end="")
        return runs.read_text()

    def notebook() -> list[list[str]]:
        monkeypatch.setattr(Once, "asked", Counter())
        monkeypatch.setattr(once, "classes", Counter())
        own = type("Own", (str,), {})
        return [run(job, *given, ranks=1) for given in (("a",), ("b",), ("a",), ("d", "", own), ("c", "said"))]

    monkeypatch.setattr("labs.kit.ranks.run.Team", Once)
    monkeypatch.setattr(Once, "place", tmp_path / "jobs", raising=False)
    monkeypatch.setattr("cloudpickle.cloudpickle._get_or_create_tracker_id", once.name_class)
    first = notebook()
    assert first == [["a"], ["ab"], ["aba"], ["abad"], ["abadc"]]
    assert notebook() == [*first[:-1], ["abadcc"]], "what prints is run again"
