"""Small mistakes in the textbook, put in one at a time: do the module's own tests notice?

    python -m tests.mistakes              all of them; prints what nobody noticed, and the share
    python -m tests.mistakes fsdp zero    those of some modules

A line that can be wrong without any test failing is a claim without a test, or a line that can go.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
AT_ONCE, LONGEST = 2, 1800.0  # s: a mistake may also make a job hang, which is as good as a failure
TESTS = {  # of each module: what to run, and of the odd trainings, which rows
    "fsdp": (["test_fsdp.py"], "fsdp or hsdp"),
    "zero": (["test_zero.py"], "zero"),
    "tp": (["test_tp.py", "test_alike.py"], "tp"),
    "pp": (["test_pp.py", "test_pp_odd.py", "test_pp_schedules.py"], "pp-"),
    "dtensor": (["test_dtensor.py", "test_redistribute.py", "test_placement.py"], ""),
}


@dataclass(frozen=True)
class Mistake:
    """In a file of labs, `wrong` instead of `right`, which stands there once."""

    module: str
    file: str
    right: str
    wrong: str

    def stands(self, tree: Path = ROOT) -> int:
        return (tree / "labs" / self.file).read_text().count(self.right)

    def make(self, tree: Path) -> None:
        file = tree / "labs" / self.file
        file.write_text(file.read_text().replace(self.right, self.wrong))


def noticed(mistake: Mistake) -> bool:
    """Whether a test of the module fails, or is stopped, in a copy of the course that has it."""
    files, rows = TESTS[mistake.module]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "course"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "__pycache__", "*.ipynb", "images"))
        mistake.make(tree)
        tests = [["tests/test_odd.py", "-k", rows]] if rows else []
        tests += [[f"tests/{file}"] for file in files]
        return any(fails(tree, which) for which in tests)


def fails(tree: Path, which: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *which]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    if done.returncode > 1:
        raise RuntimeError(f"{' '.join(command)} did not run:\n{done.stdout[-2000:]}")
    return done.returncode == 1


def main(*modules: str) -> None:
    chosen = [mistake for mistake in MISTAKES if not modules or mistake.module in modules]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(chosen, pool.map(noticed, chosen), strict=True))
    for mistake, was in found.items():
        if not was:
            print(f"not noticed, labs/{mistake.file}: {mistake.wrong!r} for {mistake.right!r}")
    print(f"{sum(found.values())} of {len(found)} mistakes are noticed")


def of(module: str, file: str, *pairs: tuple[str, str]) -> list[Mistake]:
    return [Mistake(module, file, right, wrong) for right, wrong in pairs]


MISTAKES = [
    *of(
        "pp",
        "pp/executor.py",
        ("y = loss.detach(), loss / self.microbatches", "y = loss.detach(), loss / (self.microbatches + 1)"),
        ("(s, m) in self.split else", "(s, m) not in self.split else"),
        ("if s > self.first_trained and x.grad is None", "if s < self.first_trained and x.grad is None"),
        ("torch.zeros_like(x) if x.grad is None", "torch.ones_like(x) if x.grad is None"),
        ("        self.tied.begin()\n", ""),
        ("        self.mail.end()\n", ""),
        ("for p in self.parameters() if self.tied.is_counted(p)]", "for p in self.parameters()]"),
        ("if not y.requires_grad and s >= self.first_trained", "if not y.requires_grad and s > self.last"),
    ),
    *of(
        "pp",
        "pp/deferred.py",
        ("        if torch._C._will_engine_execute_node(ctx.stand_in):\n    ", "        if True:\n    "),
        ("            self.products = []\n            torch", "            torch"),
    ),
    *of(
        "pp",
        "pp/tied.py",
        ("and p.requires_grad}", "}"),
        ("self.shared.get(p, [self.rank])[0] == self.rank", "self.shared.get(p, [self.rank])[-1] != self.rank"),
        ("total if earlier is None else earlier.add_(total)", "total"),
    ),
    *of(
        "pp",
        "pp/messages.py",
        ("x = self.made.pop(step.message).contiguous()", "x = self.made.pop(step.message)"),
        ("if place < knows[rank][to]:", "if place <= knows[rank][to] + 1:"),
    ),
    *of(
        "dtensor",
        "dtensor.py",
        ("Replicate() if before.is_partial() and not now.is_partial() else before", "before"),
        ("Redistribute.apply(gradient, without_partial(ctx.placements)).to_local()", "gradient.to_local()"),
        ("if run_check:", "if not run_check:"),
        ("grad_placements or without_partial(x.placements)", "without_partial(x.placements)"),
        (
            "        local = dealt(local, line, placement, src_data_rank)",
            "        local = dealt(local, line, placement, 0)",
        ),
    ),
    *of(
        "dtensor",
        "operation.py",
        ("if op._schema.is_mutable or tensors[0].is_contiguous():", "if True:"),
        ("any(placement.is_partial() for placement in first.placements)", "False"),
        ("moved = [g.moved(p.placements) for", "moved = [g._local_tensor for"),
        ("if result.shape != out.shape:", "if result.ndim != out.ndim:"),
    ),
    *of(
        "dtensor",
        "redistribute.py",
        ("local.clone() if line.rank == 0 else torch.zeros_like(local)", "local.clone()"),
        ("for axis in reversed(range(len(now))):", "for axis in range(len(now)):"),
        ("target[axis] if fits(now, target, axis) else Replicate()", "target[axis]"),
        (
            "return (line.ranks - 1) * line.numel(source.dim, target.dim)",
            "return (line.ranks - 1) * line.numel(source.dim)",
        ),
        ("        now[step.axis] = step.target\n", ""),
    ),
]

if __name__ == "__main__":
    main(*sys.argv[1:])
