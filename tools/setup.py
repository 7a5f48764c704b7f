"""Install the course in .venv: print a line, show on a terminal what is being done, and log everything else.

    .venv/bin/python -m tools.setup TORCH [EXTRA ...]   of gspmd, deepspeed, clusters, types and test

It runs before anything is installed, so it uses only the standard library.

which PyTorch   On Linux without an NVIDIA GPU it takes the build without CUDA (200 MB instead of several GB), if
                PyTorch's index of such builds answers.  CPU=1 or CUDA=1 in the environment asks for one of the two;
                .venv/build remembers it.  If the installer finds another build, the set-up fails and says so.
                For learners on laptops, and for those who build an image without a GPU for machines that have one.
installer       It uses uv if uv is found, else pip.  uv does not read pip's settings, so they are passed to it: for
                readers behind a company's index.
extras          The tests also install the other extras; if these cannot be installed, the tests do without: for
                contributors on a machine where JAX or DeepSpeed cannot be had.
stamps          It leaves stamps for make: .venv/course-TORCH, with -cpu or -cuda behind it if that was asked for, and
                likewise tests-TORCH and gspmd-TORCH.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / os.environ.get("VENV", ".venv")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SILENT = "PyTorch's index without CUDA does not answer"
PATIENCE = 3.0  # seconds for the index to answer
# The messages of pip and uv when they cannot reach an index at all.
UNREACHABLE = r"NewConnectionError|NameResolutionError|Failed to establish a new connection|dns error|tcp connect error"
OPTIONAL = ("gspmd", "deepspeed", "clusters", "types")  # extras that only parts of the course need
NVIDIA = ("/dev/nvidia0", "/dev/nvidiactl", "/proc/driver/nvidia", "/usr/lib/wsl/lib/nvidia-smi")
PIP_TO_UV = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


def main(torch: str, *extras: str) -> int:
    if unknown := sorted(set(extras) - set(known())):
        print(f"EXTRA={','.join(unknown)}: there is {', '.join(OPTIONAL)}", file=sys.stderr)
        return 2
    began, remembered = time.monotonic(), remembered_build()
    build, why = choose_build(os.environ, remembered)
    print(f"Setting up {VENV.name}, once: PyTorch {torch}{why}", flush=True)
    prepare(torch, build, extras)
    log = VENV / "setup.log"
    log.write_text("")
    if build != remembered and any(VENV.glob("lib/python*/site-packages/torch-*.dist-info")):
        follow([*pip(), "uninstall", "--yes", "torch"], {}, log)  # the pin does not distinguish the two builds
    besides = all_then_fewer(OPTIONAL) if "test" in extras else [()]
    attempts = [(*extras, *more) for more in besides]
    done = next((attempt for attempt in attempts if install(attempt, build, log)), None)
    if done is None:
        text = log.read_text(errors="replace")
        if re.search(UNREACHABLE, text):
            print(f"No package index answers: is there a network? {log} has the details", file=sys.stderr)
            return 1
        print(*text.splitlines()[-12:], sep="\n", file=sys.stderr)
        print(f"Setting up failed: above are the last lines of {log}, which has all of it", file=sys.stderr)
        return 1
    if wrong := other_build(build):
        print(wrong, file=sys.stderr)
        return 1
    (VENV / "build").write_text(build)
    for stamp in stamps(torch, build, done):
        stamp.touch()
    if without := [extra for extra in attempts[0] if extra not in done]:
        print(f"Without {', '.join(without)}, which cannot be installed here: {log} says why")
    print(f"Ready after {time.monotonic() - began:.0f} s; all of it is in {log}", flush=True)
    return 0


def all_then_fewer(extras: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [some for number in range(len(extras), -1, -1) for some in combinations(extras, number)]


# ---- the build of PyTorch --------------------------------------------------------------------------------


def remembered_build() -> str:
    kept = VENV / "build"
    return kept.read_text() if kept.exists() else ""


def choose_build(asked: Mapping[str, str], remembered: str, platform: str = sys.platform) -> tuple[str, str]:
    """Return "cpu" (without CUDA), "cuda" or "" (whatever the installer finds), and the words that describe the
    choice.
    """
    if asked.get("CUDA"):
        return "cuda", " with CUDA"
    if asked.get("CPU"):
        return "cpu", " without CUDA" + ("" if cpu_index() else f", where pip finds it: {SILENT}")
    if remembered or platform != "linux" or has_nvidia():
        return remembered, {"cpu": " without CUDA", "cuda": " with CUDA"}.get(remembered, "")
    if cpu_index():
        return "cpu", " without CUDA, as there is no NVIDIA GPU here (CUDA=1 asks for the other)"
    return "", f" as pip finds it: there is no NVIDIA GPU here, but {SILENT}"


@cache
def cpu_index() -> str:
    """Return the address of PyTorch's index without CUDA, or "" if it does not answer.

    If it does not, pip would ask it for every package, and wait each time.
    """
    return CPU_INDEX if answers(f"{CPU_INDEX}/torch/") else ""


def other_build(build: str) -> str:
    """Return a sentence if the PyTorch that is installed is not the build that was asked for, else ""."""
    asking = "import torch; print(torch.version.cuda or '')"
    cuda = subprocess.run([str(VENV / "bin/python"), "-c", asking], capture_output=True, text=True).stdout.strip()
    if build == "cpu" and cuda:
        return (
            f"CPU=1 asks for PyTorch without CUDA, and pip has found the build with CUDA {cuda}: "
            f"{CPU_INDEX} did not answer. Try again when it does, or leave out CPU=1: the other build runs here, too"
        )
    if build == "cuda" and not cuda:
        return (
            "CUDA=1 asks for PyTorch with CUDA, and pip has found the build without: see PIP_FIND_LINKS and pip's index"
        )
    return ""


def has_nvidia() -> bool:
    return bool(shutil.which("nvidia-smi")) or any(map(os.path.exists, NVIDIA))


def answers(address: str) -> bool:
    """Return whether the address answers within PATIENCE.

    Looking up the name may take longer, and cannot be cut short.
    """
    answer = []
    asking = threading.Thread(target=lambda: answer.append(ask(address)), daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return answer == [True]


def ask(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE):
            return True
    except OSError:  # no such name, no route, or an answer that is an error
        return False


# ---- installation ----------------------------------------------------------------------------------------


def prepare(torch: str, build: str, extras: tuple[str, ...]) -> None:
    """Write the versions to install, and remove the stamps of everything that is about to change."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (VENV / "constraints.txt").write_text(re.sub(r"(?m)^torch==.*", f"torch=={torch}", pins), encoding="utf-8")
    there = {stamp for kind in ("course", "tests", *OPTIONAL) for stamp in VENV.glob(f"{kind}-*")}
    for stamp in there - set(stamps(torch, build, extras)):
        stamp.unlink()


def stamps(torch: str, build: str, extras: tuple[str, ...]) -> list[Path]:
    names = [f"{kind}-{torch}" for kind in ("course", *("tests" if extra == "test" else extra for extra in extras))]
    return [VENV / name for name in (*names, *(f"{name}-{build}" for name in names if build))]


def known() -> dict[str, list[str]]:
    """Return the extras of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def install(extras: tuple[str, ...], build: str, log: Path) -> bool:
    return any(follow(*installer, log) == 0 for installer in installers(extras, build))


def pip() -> list[str]:
    return [str(VENV / "bin/python"), "-m", "pip", "--disable-pip-version-check"]


def installers(extras: tuple[str, ...], build: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield a command line and variables per installer that is available: if one fails, the next may succeed."""
    course = f".[{','.join(extras)}]" if extras else "."
    what = ["--constraint", str(VENV / "constraints.txt"), "--editable", course]
    if uv := shutil.which("uv"):
        python = ["--python", str(VENV / "bin/python"), "--index-strategy", "unsafe-best-match"]  # the strategy of pip
        yield [uv, "pip", "install", *python, *what], uv_settings(pip_settings(), build)
    index = ["--extra-index-url", cpu_index()] if build == "cpu" and cpu_index() else []
    # Python compiles modules when they are first imported, and most never are.
    yield [*pip(), "install", "--no-compile", "--progress-bar", "off", *index, *what], {}


def pip_settings() -> dict[str, str]:
    """Return pip's settings on this machine, from files and variables: {"find-links": "/opt/wheels"}."""
    lines = subprocess.run([*pip(), "config", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    pairs = (line.partition("=")[::2] for line in lines if "=" in line)
    return {name.rpartition(".")[2]: ast.literal_eval(value) for name, value in pairs}


def uv_settings(settings: Mapping[str, str], build: str) -> dict[str, str]:
    """Return uv's variables for the same settings. A variable that is already set keeps its value."""
    variables = {PIP_TO_UV[name]: value for name, value in settings.items() if name in PIP_TO_UV}
    if "UV_FIND_LINKS" in variables:
        variables["UV_FIND_LINKS"] = ",".join(variables["UV_FIND_LINKS"].split())
    variables |= {name: os.environ[name] for name in variables.keys() & os.environ.keys()}
    if build == "cpu" and cpu_index():
        variables["UV_INDEX"] = f"{CPU_INDEX} {variables.get('UV_INDEX') or os.environ.get('UV_INDEX', '')}".strip()
    return variables


# ---- output ----------------------------------------------------------------------------------------------


def follow(command: list[str], environment: Mapping[str, str], log: Path) -> int:
    """Run the command, with its output in the log; on a terminal, show what it is doing. Returns its exit status."""
    began = time.monotonic()
    # pip unpacks into TMPDIR, and /tmp is often too small for PyTorch. PIP_USER would install everything elsewhere.
    with log.open("a") as file, tempfile.TemporaryDirectory(dir=VENV) as scratch:
        print("$", *command, file=file, flush=True)
        settings = {**os.environ, "PIP_USER": "0", "TMPDIR": scratch, **environment}
        process = subprocess.Popen(command, cwd=ROOT, env=settings, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if sys.stdout.isatty():
                line = progress(log.read_text(errors="replace"), time.monotonic() - began)
                print(f"\r{line}\033[K", end="", flush=True)
            time.sleep(0.2)
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    return process.returncode


def progress(log: str, seconds: float) -> str:
    """Return a line that fits the terminal, with the current activity from the output of pip or uv."""
    steps = re.findall(r"(?m)^ *((?:Collecting|Processing|Downloading|Building|Installing) .*)", log)
    line = f"  {seconds:3.0f} s  {steps[-1] if steps else ''}"
    return line[: shutil.get_terminal_size().columns - 1]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
