"""Mistakes put into the textbook, one at a time: do the tests notice?

    python -m tests.mistakes                    the thirty named ones
    python -m tests.mistakes --random 60        so many drawn at random over the textbook; --seed 7 draws the same again
    python -m tests.mistakes fsdp zero          only those in files whose names begin so

For each mistake, the tests run that `make quick` would run for its file.  A line that can be wrong without any test
failing is a claim without a test, or a line that can go.  A mutant that changes nothing, such as a `+ 0` that becomes a
`- 0`, is for a person to judge.
"""

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.imports import FILES, LABS, ROOT, name_of
from tools.quick import TESTS, is_textbook, runs_for

AT_ONCE, LONGEST = 2, 1800.0  # s: a mistake may also make a job hang, which is as good as a failure


@dataclass(frozen=True)
class Mistake:
    """A file of labs with something else in it.

    file: below labs/.
    text: the whole file with the mistake.
    words: what was changed.
    """

    file: str
    text: str
    words: str


# ---- drawn at random -------------------------------------------------------------------------------------

SWAPS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def mutations(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield pairs of a node and what could stand in its place."""
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in SWAPS:
                yield node, changed(node, op=SWAPS[type(op)]())
            case ast.Compare(ops=[op]) if type(op) in SWAPS:
                yield node, changed(node, ops=[SWAPS[type(op)]()])
            case ast.UnaryOp(op=ast.Not()):
                yield node, node.operand
            case ast.Constant(value=bool(value)):
                yield node, changed(node, value=not value)
            case ast.Constant(value=int(value)):
                yield node, changed(node, value=value + 1)
            case ast.If(test=test) | ast.IfExp(test=test):
                yield node, changed(node, test=ast.UnaryOp(ast.Not(), test))
            case ast.Expr(value=ast.Call()):
                yield node, ast.Pass()
            case ast.AugAssign():
                yield node, ast.Assign([node.target], node.value)


def changed(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


class Exchange(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def draw(number: int, seed: int, prefixes: tuple[str, ...]) -> list[Mistake]:
    """Return mutants, each with the same chance among all that the textbook has."""
    textbook = [path for path in FILES if is_textbook(name_of(path)) and name_of(path).startswith(prefixes)]
    places = []
    for path in textbook:
        count = len(list(mutations(ast.parse(path.read_text(encoding="utf-8")))))
        places += [(path, at) for at in range(count)]
    return [mutant(*place) for place in random.Random(seed).sample(places, number)]


def mutant(path: Path, at: int) -> Mistake:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    old, new = list(mutations(tree))[at]
    words = f"line {old.lineno}: {ast.unparse(ast.fix_missing_locations(new))!r} for {ast.unparse(old)!r}"
    text = ast.unparse(ast.fix_missing_locations(Exchange(old, new).visit(tree)))
    return Mistake(str(path.relative_to(LABS)), text + "\n", words)


# ---- named -----------------------------------------------------------------------------------------------

NAMED = [  # a file, words that stand in it once, and what is there instead
    ("checkpoint/agreement.py", "        compare(copies, partial(differ_in_numbers, piece[0]))\n", "        pass\n"),
    ("checkpoint/index.py", "    if checksum(path) != written:\n", "    if False:\n"),
    ("checkpoint/index.py", "        lock(index)\n        remove(draft)\n", "        pass\n"),
    ("checkpoint/parts.py", "offset[how.dim] + how.starts[rank]", "offset[how.dim]"),
    ("checkpoint/parts.py", "return key not in COUNTERS and all(", "return all("),
    ("checkpoint/randomness.py", '        torch.Generator("cpu").set_state(cpu)\n', ""),
    ("checkpoint/background.py", "rooms.get(piece)", "None"),
    ("fsdp/module_events.py", "        output = cast(self.policy.output_dtype, output)\n", ""),
    (
        "fsdp/parameter_group.py",
        "            if self.reshard_after_backward:\n                self.drop()",
        "            self.drop()",
    ),
    ("fsdp/step_state.py", "            group.kept = None\n", "            pass\n"),
    (
        "fsdp/order.py",
        "return self.last[n : n + 1] if self.last[:n] == self.now else []",
        "return self.last[n : n + 1]",
    ),
    ("fsdp/parameter_group.py", ".div_(self.group.divisor / self.before)", ".div_(self.group.ranks / self.before)"),
    (
        "fsdp/parameter_group.py",
        "p.pending = gradient if p.pending is None else p.pending.add_(gradient)",
        "p.pending = gradient",
    ),
    ("zero/zero.py", "                unit.require_as_sharded()\n", "                pass\n"),
    (
        "zero/zero.py",
        "        self.order.compare(self.shards[0].device)\n        for unit in due:",
        "        for unit in due:",
    ),
    ("zero/flat.py", ".div_(self.ranks / before)", ".div_(1 / before)"),
    ("zero/flat.py", "mean if self.shard.grad is None else self.shard.grad.add_(mean)", "mean"),
    (
        "tp/conjugate.py",
        "(Replicate(), Replicate()), (Partial(), Replicate()))\n\n\ndef reduce",
        "(Replicate(), Replicate()), (Replicate(), Replicate()))\n\n\ndef reduce",
    ),
    ("tp/tp.py", "p.grad = None if gradient is None else part_of(gradient, cut, rank)", "p.grad = None"),
    ("tp/parallel_layers.py", "self.region and input is self.region.given else", "self.region else"),
    (
        "tp/parallel_layers.py",
        "torch.manual_seed(seed * mesh.size() + mesh.get_local_rank())",
        "torch.manual_seed(seed * mesh.size())",
    ),
    ("cp/partial_softmax.py", "(hidden | others)", "hidden"),
    ("cp/ring.py", "            if arrived:\n                part += arrived()\n", ""),
    ("cp/gathered_keys.py", "part[: len(places)]", "part"),
    ("cp/cp.py", "over / len(self.pieces.places)", "over"),
    ("parallel.py", "over and over / size_of_cp(self.mesh)", "over"),
    (
        "pp/executor.py",
        "y = loss.detach(), loss / self.microbatches",
        "y = loss.detach(), loss / (self.microbatches + 1)",
    ),
    ("pp/executor.py", "for p in self.parameters() if self.tied.is_counted(p)]", "for p in self.parameters()]"),
    (
        "pp/split_backward.py",
        "x.requires_grad and trained(matrix) and all(map(self.may_wait, trained(matrix)))",
        "x.requires_grad",
    ),
    ("pp/tied.py", "for copy in self.here if copy.trained}", "for copy in self.here}"),
    ("moe/expert_parallel.py", "p.grad /= dist.get_world_size(self.group)", 'p.grad /= self.mesh.size("edp")'),
    ("moe/expert_parallel.py", ' | dict.fromkeys(self.experts, self.mesh.size("edp"))', ""),
    ("moe/expert_parallel.py", "copies[p] = alike * cut.copies", "copies[p] = cut.copies"),
    ("moe/exchange.py", "torch.cat(results[::-1])", "torch.cat(results)"),
    ("moe/mixture.py", "torch.where(weights_NK.isnan().any(), -1, counts_E)", "counts_E"),
    ("moe/router.py", "scores_NE.detach() + self.bias", "scores_NE.detach()"),
    ("gspmd/propagation.py", "return min(letters, key=elsewhere)", "return letters[0]"),
    ("dtensor/dtensor.py", "Replicate() if before.is_partial() and not now.is_partial() else before", "before"),
    ("dtensor/redistribute.py", "local.clone() if line.rank == 0 else torch.zeros_like(local)", "local.clone()"),
    ("dtensor/redistribute.py", "target[axis] if fits(now, target, axis) else Replicate()", "target[axis]"),
    (
        "plan/room.py",
        "stages_alive(schedule, pp, rank, m, stages) / stages",
        "stages_alive(schedule, pp, rank, m, stages)",
    ),
]


def named(prefixes: tuple[str, ...]) -> list[Mistake]:
    found = []
    for file, right, wrong in NAMED:
        if file.startswith(prefixes):
            text = (LABS / file).read_text(encoding="utf-8")
            found.append(Mistake(file, text.replace(right, wrong), f"{wrong!r} for {right!r}"))
    return found


# ---- are they noticed? -----------------------------------------------------------------------------------


def is_noticed(mistake: Mistake) -> bool:
    """Return whether a test that `make quick` chooses fails, or is stopped, in a copy of the course with it."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "course"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "__pycache__", "*.ipynb", "images"))
        (tree / "labs" / mistake.file).write_text(mistake.text, encoding="utf-8")
        runs = runs_for({LABS / mistake.file})
        return any(fails(tree, [word.replace(str(TESTS), "tests") for word in run]) for run in runs)


def fails(tree: Path, which: list[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *which]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m tests.mistakes", description=__doc__.splitlines()[0])
    options.add_argument("prefixes", nargs="*", default=[""], help="how the names of the files begin, like fsdp")
    options.add_argument(
        "--random", type=int, default=0, metavar="N", help="so many mutants in place of the named ones"
    )
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    chosen = options.parse_args()
    prefixes = tuple(chosen.prefixes)
    if chosen.random:
        print(f"seed {chosen.seed}")
    mistakes = draw(chosen.random, chosen.seed, prefixes) if chosen.random else named(prefixes)
    noticed = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mistake, was in zip(mistakes, pool.map(is_noticed, mistakes), strict=True):
            noticed += was
            print(f"{'noticed' if was else 'NOT NOTICED'}, labs/{mistake.file} {mistake.words}", flush=True)
    print(f"{noticed} of {len(mistakes)} mistakes are noticed")


if __name__ == "__main__":
    main()
