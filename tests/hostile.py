"""Hostile submissions to the exercise mean_on_rank_0, as text: never run them outside of the sandbox.

A submission is the body of the function `mean_on_rank_0(x)`, with HONEST at its end where the trick hides behind a
right answer.  Each has the points that it gets, and words of the reason; the tricks that do nothing get 10.
"""

from typing import NamedTuple

HONEST = """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(x, dst=0)
        return None
    total, theirs = x.clone(), torch.empty_like(x)
    for other in range(1, ranks):
        dist.recv(theirs, src=other)
        total += theirs
    return total.div_(ranks)
"""


class Hostile(NamedTuple):
    does: str
    body: str
    points: int
    words: str = "✗"
    top: str = ""  # lines of the cell above the function

    @property
    def cell(self) -> str:
        lines = "\n".join(f"    {line}" for line in self.body.strip("\n").splitlines() if self.body != HONEST)
        return f"{self.top}\ndef mean_on_rank_0(x):\n{lines or HONEST}\n\ncheck.mean_on_rank_0(mean_on_rank_0)\n"


RIGHT = "✓ mean_on_rank_0: 3 messages on 4 ranks; the least possible is 3. It held 1.00 × the tensor"
SUBMISSIONS = (
    Hostile("prints a ✓ itself", f'print("{RIGHT}", flush=True)\nreturn x', 0, top=f'print("{RIGHT}")'),
    Hostile(
        "replaces check",
        "from labs.exercises.engine import on_ranks\n"
        "from labs.exercises.start_here import mean_on_rank_0 as its\n"
        "on_ranks.checked = its.checked = lambda *args: None\n"
        "return x",
        0,
        top="import labs.kit.check\nlabs.kit.check.mean_on_rank_0 = check.mean_on_rank_0 = lambda fn: True",
    ),
    Hostile(
        "edits labs",
        "import labs.exercises.start_here.mean_on_rank_0 as its\n"
        'open(its.__file__, "a").write("\\ndef mean_on_rank_0(fn): return True\\n")',
        0,
        "'/course/labs/exercises/start_here/mean_on_rank_0.py'",  # read-only, or owned by another user
    ),
    Hostile(
        "reads the solutions",
        "import os\n"
        'found = [at for at, _, names in os.walk("/") for name in names if name.startswith("00_start_here")]\n'
        'raise RuntimeError(f"{len(found)} files")',
        0,
        "RuntimeError: 0 files",
    ),
    Hostile(
        "forks for ever",
        "import os, time\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        time.sleep(1)",
        0,
    ),
    Hostile(
        "fills the disk",
        'with open("full", "wb") as file:\n    while True:\n        file.write(bytes(1 << 20))',
        0,
        "No space left on device",
    ),
    Hostile("takes 6 GB", "return torch.ones(6 << 30, dtype=torch.uint8)", 0, "far too much memory"),
    Hostile(
        "takes 6 GB beside torch's memory",
        "import os, time\n"
        "for n in range(24 * (dist.get_rank() == 0)):\n"
        "    file = os.memfd_create(str(n))\n"
        "    for _ in range(16):\n"
        "        os.write(file, bytes(15 << 20))\n"
        "        time.sleep(0.1)",
        0,
        "GB of memory",
    ),
    Hostile(
        "never ends",
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
        0,
    ),
    Hostile("deletes its folder", "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\nreturn x", 0),
    Hostile(
        "opens a socket",
        "import socket\nsocket.create_connection(('1.1.1.1', 53), timeout=5)",
        0,
        "Network is unreachable",
    ),
    Hostile("kills its parent", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nreturn x", 0),
    Hostile("kills all", "import os, signal\nos.kill(-1, signal.SIGKILL)", 0, "ended the process that marks it"),
    Hostile(
        "writes its own progress",
        "import pathlib\n"
        'for name in ("progress.json", "tries.json"):\n'
        '    pathlib.Path(name).write_text(\'{"mean_on_rank_0": "2026-01-01 10:00"}\')\n'
        'raise NotImplementedError("your turn")',
        0,
        "not yet",
    ),
    Hostile(
        "sends code in place of numbers",
        "class Code:\n    def __reduce__(self):\n        import os\n        return os.system, ('true',)\nreturn Code()",
        0,
    ),
    Hostile(
        "writes into the judge's memory",
        "import os\nrefused = opened = 0\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    command = open(f'/proc/{pid}/cmdline', 'rb').read().split(b'\\0')\n"
        "    if command[0].endswith(b'python') and b'tools.marking.judge' in command:\n"
        "        for way in ('mem', 'fd'):\n"
        "            try:\n"
        "                (os.listdir if way == 'fd' else open)(f'/proc/{pid}/{way}')\n"
        "                opened += 1\n"
        "            except PermissionError:\n"
        "                refused += 1\n"
        "raise RuntimeError(f'{opened} opened, {refused} refused')",
        0,
        "0 opened, 2 refused",
    ),
    Hostile(
        "hides a trick that does nothing behind a right answer", HONEST, 10, "✓", top='import os\nos.environ["X"] = "1"'
    ),
)
