"""Tests of tools.leftovers with things left behind on purpose: an orphan, a file, a segment of shared memory."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tools import leftovers

PYTHON = sys.executable
pytestmark = pytest.mark.alone  # the tests look for what appears on the machine


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(leftovers, "GRACE", 0.3)


def test_a_clean_command_keeps_its_status():
    assert leftovers.main([PYTHON, "-c", "pass"]) == 0
    assert leftovers.main([PYTHON, "-c", "raise SystemExit(3)"]) == 3


def test_an_orphan_is_found(capsys):
    assert leftovers.main(["sh", "-c", f"{PYTHON} -c 'import time; time.sleep(60)' &"]) == 1
    printed = capsys.readouterr().err
    pid = int(printed.split("process ")[1].split(":")[0])
    assert "time.sleep(60)" in printed
    psutil.Process(pid).kill()


def test_a_temporary_file_is_found_and_removed(capsys):
    assert leftovers.main([PYTHON, "-c", "import tempfile; print(tempfile.mkdtemp(prefix='mine-'))"]) == 1
    assert "temporary mine-" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no folder on this system")
def test_a_segment_of_shared_memory_is_found(capsys):
    code = "open('/dev/shm/labs-test-left', 'w').write('x')"
    try:
        assert leftovers.main([PYTHON, "-c", code]) == 1
        assert "shared memory /dev/shm/labs-test-left" in capsys.readouterr().err
    finally:
        Path("/dev/shm/labs-test-left").unlink()


def test_a_segment_that_a_live_process_holds_is_not_left_behind():
    code = "f = open('/dev/shm/labs-test-held', 'w'); print('ready', flush=True); input()"
    if not Path("/dev/shm").is_dir():
        pytest.skip("shared memory has no folder on this system")
    with subprocess.Popen([PYTHON, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        assert leftovers.in_use(Path("/dev/shm/labs-test-held"))
        holder.communicate(b"\n")
    assert not leftovers.in_use(Path("/dev/shm/labs-test-held"))
    Path("/dev/shm/labs-test-held").unlink()
