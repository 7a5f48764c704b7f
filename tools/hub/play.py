"""Play learners who work at once on one JupyterHub, and measure memory and time: `make hub USERS="1 2 4"`.

Each learner gets a token, a server and, by nbgitpuller, the notebooks; opens notebook 00; runs its cells up to the
first job; then writes the answer to the first exercise, saves, and runs the check.  All learners do the same thing at
the same time.  A line per number of learners says

    server, job, check   seconds until the last learner had it
    processor            seconds of one core that it took per learner; they hardly depend on what else the machine does
    learner, hub         MB of a learner's processes after the check, and of the hub and its proxy: their proportional
                         set size, in which those who share a page share its bytes
"""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import requests
import websocket

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "build/hub-env"
FIRST = "00_start_here.ipynb"
JOB, CHECK = "run(hello", "check.mean_on_rank_0("
PATIENCE = 600  # seconds for anything
SLOW = 60  # seconds to the first job at which a class has become too large


@dataclass
class Server:
    """A server that answers requests: the hub's or a learner's."""

    url: str
    token: str

    def api(self, method: str, path: str, **body: Any) -> requests.Response:
        """Send a request.  Raises RuntimeError with the server's words if they are an error."""
        header = {"Authorization": f"token {self.token}"}
        answer = requests.request(method, self.url + path, headers=header, timeout=PATIENCE, **body)
        if not answer.ok:
            raise RuntimeError(f"{method} {self.url}{path}: {answer.status_code} {answer.text[:300]}")
        return answer


class Hub(Server):
    """The hub as its administrator sees it."""

    def __init__(self, url: str, token: str, folder: Path) -> None:
        super().__init__(url, token)
        self.folder = folder  # has the home folder of each learner
        self.sockets = ExitStack()


class Learner(Server):
    """A learner, as the hub and their own server see them."""

    def __init__(self, hub: Hub, name: str) -> None:
        hub.api("POST", f"/hub/api/users/{name}")
        token = hub.api("POST", f"/hub/api/users/{name}/tokens").json()["token"]  # as after a log-in
        super().__init__(f"{hub.url}/user/{name}", token)
        self.hub, self.name, self.home = hub, name, hub.folder / name

    def start(self) -> None:
        user = f"/hub/api/users/{self.name}"
        self.hub.api("POST", f"{user}/server")
        wait_for(lambda: self.hub.api("GET", user).json()["servers"].get("", {}).get("ready"))

    def pull(self, repository: Path) -> None:
        """Get or update the notebooks by nbgitpuller, as a teacher's link does."""
        said = self.api("GET", f"/git-pull/api?repo={repository}&branch=main&targetpath=course").text
        if '"finished"' not in said:
            raise RuntimeError(f"nbgitpuller: {said}")

    def open(self) -> "Kernel":
        body = {"path": f"course/notebooks/{FIRST}", "name": FIRST, "type": "notebook", "kernel": {"name": "python3"}}
        return Kernel(self, self.api("POST", "/api/sessions", json=body).json()["kernel"]["id"])

    def write(self, answer: str) -> None:
        """Replace the stub of the first exercise by an answer, and save the notebook."""
        path = f"/api/contents/course/notebooks/{FIRST}"
        notebook = self.api("GET", path).json()["content"]
        next(cell for cell in notebook["cells"] if CHECK in cell["source"])["source"] = answer
        self.api("PUT", path, json={"type": "notebook", "content": notebook})


class Kernel:
    """A kernel of a learner's notebook, reached as a browser reaches it: by a websocket through the proxy."""

    def __init__(self, learner: Learner, name: str) -> None:
        self.learner, self.path = learner, f"/api/kernels/{name}"
        address = f"{learner.url}{self.path}/channels".replace("http", "ws", 1)
        header = [f"Authorization: token {learner.token}"]
        connection = websocket.create_connection(address, timeout=PATIENCE, header=header)
        self.socket = learner.hub.sockets.enter_context(closing(connection))

    def begin(self, source: str) -> str:
        """Send a cell, and return the name by which its answers are known."""
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "version": "5.3"}
        message = {"channel": "shell", "header": header, "parent_header": {}, "metadata": {}}
        self.socket.send(json.dumps({**message, "content": {"code": source}}))
        return header["msg_id"]

    def result(self, begun: str) -> str:
        """Wait for a cell and return everything that it printed, its value and its error."""
        said, waiting = "", {"execute_reply", "idle"}
        while waiting:
            message = json.loads(self.socket.recv())
            if message["parent_header"].get("msg_id") == begun:
                content, kind = message["content"], message["msg_type"]
                waiting -= {kind, content.get("execution_state")}
                said += content.get("text", "") + content.get("data", {}).get("text/plain", "")
                said += f"{content['ename']}: {content['evalue']}" if kind == "error" else ""
        return said

    def run(self, source: str, expected: str = "") -> str:
        said = self.result(self.begin(source))
        if expected not in said:
            raise RuntimeError(f"{self.learner.name}: {said} instead of {expected}")
        return said


def wait_for(ready: Callable[[], Any]) -> None:
    until = time.monotonic() + PATIENCE
    while not ready():
        if time.monotonic() > until:
            raise TimeoutError(f"not ready after {PATIENCE} s")
        time.sleep(0.2)


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def hub() -> Iterator[Hub]:
    """Start a hub with an empty folder for its learners; at the end, stop all of it and remove the folder."""
    folder, token, ports = Path(tempfile.mkdtemp(prefix="hub-")), secrets.token_hex(16), free_ports(3)
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [ENVIRONMENT / "bin/jupyterhub", "--config", ROOT / "tools/hub/jupyterhub_config.py"],
            env={**os.environ, "HUB": str(folder), "HUB_TOKEN": token, "HUB_PORTS": " ".join(map(str, ports))},
            stdout=file,
            stderr=file,
        )

    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(log.read_text()[-2000:])
        try:
            return requests.get(f"{found.url}/hub/api/", timeout=PATIENCE).ok
        except requests.ConnectionError:
            return False

    found = Hub(f"http://127.0.0.1:{ports[0]}", token, folder)
    try:
        wait_for(answers)
        yield found
    finally:
        found.sockets.close()
        process.terminate()  # the hub stops its servers and its proxy
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        for left in chain(*processes(folder).values()):
            left.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def processes(folder: Path) -> dict[str, list[psutil.Process]]:
    """Return the processes of a hub by learner, with those of the hub and its proxy under "": all inherit HUB."""
    found = defaultdict(list)
    for process in psutil.process_iter():
        try:
            variables = process.environ()
        except psutil.Error:  # it has ended, or is another user's
            continue
        if variables.get("HUB") == str(folder):
            found[variables.get("JUPYTERHUB_USER", "")].append(process)
    return found


def repository(folder: Path) -> Path:
    """Return a new git repository with the learners' notebooks, from which nbgitpuller pulls."""
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".*"))
    subprocess.run(["git", "init", "--quiet", "--initial-branch", "main"], cwd=folder, check=True)
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    teacher = ["-c", "user.name=teacher", "-c", "user.email=teacher@example.org"]
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)
    subprocess.run(["git", *teacher, "commit", "--quiet", "--message", "the course"], cwd=folder, check=True)


# ---- a class ---------------------------------------------------------------------------------------------


def lesson() -> tuple[list[str], list[str], str]:
    """Return the cells of the first solved notebook up to its first job, those after it, and its first exercise."""
    read = json.loads((ROOT / "solutions" / FIRST).read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in read if cell["cell_type"] == "code"]
    job, check = (next(place for place, text in enumerate(sources) if mark in text) for mark in (JOB, CHECK))
    return sources[: job + 1], sources[job + 1 : check], sources[check]


def memory(process: psutil.Process) -> float:
    """Return a process' proportional set size, in MB."""
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss: +(\d+)", rollup, re.MULTILINE)[1]) * 1024 / 1e6


def processor(process: psutil.Process) -> float:
    """Return the seconds of processor time of a process, and of its children that have ended."""
    return sum(process.cpu_times()[:4])


def total(measure: Callable[[psutil.Process], float], processes: Iterable[psutil.Process]) -> float:
    found = 0.0
    for process in processes:
        with suppress(OSError, TypeError, psutil.Error):  # it ends meanwhile
            found += measure(process)
    return found


def play(number: int) -> dict[str, float]:
    """Play a class of this many learners, and return what the docstring above lists."""
    (*before, job), between, exercise = lesson()
    with hub() as found, ThreadPoolExecutor(number) as pool:
        upstream = repository(found.folder / "upstream")
        learners = [Learner(found, f"learner{each}") for each in range(number)]

        def per_learner(measure: Callable[[psutil.Process], float]) -> float:
            return sum(total(measure, of) for name, of in processes(found.folder).items() if name) / number

        def together(act: Callable[..., Any], *more: Sequence[Any]) -> tuple[list[Any], float, float]:
            """Return what each learner got, the seconds, and the processor's seconds per learner."""
            began, used = time.monotonic(), per_learner(processor)
            got = list(pool.map(act, learners, *more))
            return got, time.monotonic() - began, per_learner(processor) - used

        def first_job(learner: Learner) -> Kernel:
            kernel = learner.open()
            for source in before:
                kernel.run(source)
            kernel.run(job, "I am rank 3 of 4")
            return kernel

        def check(learner: Learner, kernel: Kernel) -> None:
            learner.write(exercise)
            kernel.run(exercise, "✓")

        _, server, _ = together(Learner.start)
        together(lambda learner: learner.pull(upstream))
        kernels, to_job, job_used = together(first_job)
        for source in between:
            together(lambda _, kernel, source=source: kernel.run(source), kernels)
        _, to_check, check_used = together(check, kernels)
        return {
            **{"server, s": server, "job, s": to_job, "processor of the job, s": job_used},
            **{"check, s": to_check, "processor of the check, s": check_used},
            **{"learner, MB": per_learner(memory), "hub, MB": total(memory, processes(found.folder)[""])},
        }


def main(arguments: Sequence[str]) -> int:
    for number in map(int, arguments or ("1", "2", "4", "8", "16")):
        load, found = os.getloadavg()[0], play(number)
        said = "   ".join(f"{name} {value:.1f}" for name, value in found.items())
        print(f"{number} at once, load before {load:.1f}:   {said}", flush=True)
        if found["job, s"] > SLOW:
            print(f"A first job took more than {SLOW} s, so more learners are not tried")
            break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
