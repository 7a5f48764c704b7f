"""Small mistakes in the textbook, put in one at a time: do the module's own tests notice?

    python -m tests.mistakes              all of them; prints which were noticed, and the share
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

from tools.quick import ROWS

ROOT = Path(__file__).parents[1]
AT_ONCE, LONGEST = 2, 1800.0  # s: a mistake may also make a job hang, which is as good as a failure


@dataclass(frozen=True)
class Mistake:
    """A mistake in a file of labs: `wrong` instead of `right`, which occurs there once."""

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
    """Return whether a test of the module fails, or is stopped, in a copy of the course with the mistake."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "course"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "__pycache__", "*.ipynb", "images"))
        mistake.make(tree)
        tests = [["tests/test_odd.py", "-k", ROWS[mistake.module]]] if mistake.module in ROWS else []
        return any(fails(tree, which) for which in [*tests, [f"tests/{mistake.module}"]])


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
    found = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for mistake, was in zip(chosen, pool.map(noticed, chosen), strict=True):
            found += was
            sign = "noticed" if was else "NOT NOTICED"
            print(f"{sign}, labs/{mistake.file}: {mistake.wrong!r} for {mistake.right!r}", flush=True)
    print(f"{found} of {len(chosen)} mistakes are noticed")


def of(module: str, file: str, *pairs: tuple[str, str]) -> list[Mistake]:
    return [Mistake(module, file, right, wrong) for right, wrong in pairs]


MISTAKES = [
    *of(
        "checkpoint",
        "checkpoint/agreement.py",
        ("        compare(copies, partial(differ_in_numbers, piece[0]))\n", "        pass\n"),
        ("if holders[piece] > 1}", "if holders[piece] > 2}"),
        ("    require_kept_alike(described)\n", ""),
        ("        require_whole(key, shape, {block for *_, blocks in of_each.values() for block in blocks})\n", ""),
    ),
    *of(
        "checkpoint",
        "checkpoint/index.py",
        ("        if found != sealed(record):\n", "        if False:\n"),
        ("    if checksum(path) != written:\n", "    if False:\n"),
        ("        lock(index)\n        remove(draft)\n", "        pass\n"),
        ("        lock(index)\n        remove", "        remove"),
    ),
    *of(
        "checkpoint",
        "checkpoint/parts.py",
        ("offset[how.dim] + how.starts[rank]", "offset[how.dim]"),
        ("        self.zero.refresh(self.zero.units)\n", "        pass\n"),
        ("return key not in COUNTERS and all(", "return all("),
    ),
    *of(
        "checkpoint",
        "checkpoint/optimizer_state.py",
        ("            self.inner.state.pop(copy, None)\n", ""),
        ("                copy.detach().copy_(p)\n", "                pass\n"),
        ("                    group[key].fill_(value)\n", "                    group[key] = value\n"),
    ),
    *of(
        "checkpoint",
        "checkpoint/loading.py",
        ("            if one != two:\n", "            if False:\n"),
        ("            if kept.get(name, {}).keys() != kept.get(other, {}).keys():\n", "            if False:\n"),
    ),
    *of(
        "checkpoint",
        "checkpoint/randomness.py",
        ('        torch.Generator("cpu").set_state(cpu)\n', ""),
        ("python = version, tuple(numbers), gauss", "python = version, tuple(numbers), None"),
    ),
    *of(
        "checkpoint",
        "checkpoint/background.py",
        ("found[piece] = room.copy_(x, non_blocking=True)", "found[piece] = x"),
        ("self.group = group or self.own_group", "self.group = group"),
        ("        self.wait()\n        taken", "        taken"),
        ("self.last = written.result()", "written.result()"),
        ("rooms.get(piece)", "None"),
        ("            self.unasked.detach()\n", ""),
    ),
    *of(
        "fsdp",
        "fsdp/fsdp.py",
        (
            "for axis in mesh.mesh_dim_names:\n        require_equal",
            "for axis in mesh.mesh_dim_names[-1:]:\n        require_equal",
        ),
    ),
    *of(
        "fsdp",
        "fsdp/sharding.py",
        ("if not in_backward() and self.group.follow():", "if in_backward() and self.group.follow():"),
        ("        self.group.require_unwritten()\n", ""),
        ("        if in_backward():  # backward needs them at once\n            return\n", ""),
        ("        output = cast(self.policy.output_dtype, output)\n", ""),
        (
            "            if self.reshard_after_backward:\n                self.group.drop()",
            "            self.group.drop()",
        ),
        ("if versions != self.group.shard_versions():", "if False:"),
        ("        if self.due == 0:\n            self.reduce()", "        self.reduce()"),
    ),
    *of(
        "fsdp",
        "fsdp/shared_state.py",
        ("            group.kept = None\n", "            pass\n"),
        (
            "            self.order.agreed[what] = order\n",
            "            self.order.agreed[what] = []\n",
        ),
        ("        for member in reversed([*self.order.waiting]):\n            member.reduce()\n", ""),
        (
            "                if other.group.arriving:  # a prefetch in vain\n                    other.group.drop()\n",
            "                pass\n",
        ),
    ),
    *of(
        "fsdp",
        "fsdp/order.py",
        ("return self.last[n : n + 1] if self.last[:n] == self.now else []", "return self.last[n : n + 1]"),
        ("return self.now[max(place - 1, 0) : place]", "return self.now[place : place + 1]"),
    ),
    *of(
        "fsdp",
        "fsdp/parameter_group.py",
        (".div_(self.group.divisor / self.before)", ".div_(self.group.ranks / self.before)"),
        ("p.pending = gradient if p.pending is None else p.pending.add_(gradient)", "p.pending = gradient"),
        ("            p.pending = None\n            if hasattr", "            if hasattr"),
        ("if not (p in self.missing and is_nothing(piece)):", "if True:"),
    ),
    *of(
        "fsdp",
        "fsdp/sharded.py",
        ("            pieces[complete, len(over) :].zero_()\n", ""),
        ("self.shard.grad.to_local().add_(own)", "self.shard.grad.to_local().copy_(own)"),
        ("        self.versions.forbid()\n", ""),
    ),
    *of(
        "zero",
        "zero/zero.py",
        ("            require_equal_replicas(model, group)\n", "            pass\n"),
        ("                unit.require_as_sharded()\n", "                pass\n"),
        ("        if updates != self.updates:\n", "        if False:\n"),
        ("        self.order.compare(self.shards[0].device)\n        for unit in due:", "        for unit in due:"),
        ("        for work in works:\n            work.wait()\n", ""),
        ("        self.updates += 1\n", ""),
    ),
    *of("zero", "zero/flattenable.py", ("    if taken != sorted(taken):\n", "    if False:\n")),
    *of(
        "zero",
        "zero/flat.py",
        (".div_(self.ranks / before)", ".div_(1 / before)"),
        ("        self.shard.grad = None\n", ""),
        ("mean if self.shard.grad is None else self.shard.grad.add_(mean)", "mean"),
        ("                unit.versions.allow()\n", ""),
        ("        self.versions.renew()\n", ""),
        ("            if used and not unit.users:\n", "            if used:\n"),
        ("        return [*sizes, -sum(sizes) % self.ranks]", "        return [*sizes, sum(sizes) % self.ranks]"),
    ),
    *of(
        "tp",
        "tp/conjugate.py",
        (
            "(Replicate(), Replicate()), (Partial(), Replicate()))\n\n\ndef reduce",
            "(Replicate(), Replicate()), (Replicate(), Replicate()))\n\n\ndef reduce",
        ),
        (
            "(Shard(dim), Replicate()), (Partial(), Shard(dim)))",
            "(Shard(dim), Replicate()), (Replicate(), Shard(dim)))",
        ),
        ("mesh.get_group() if ranks == mesh.size() else smaller_group(mesh, ranks)", "mesh.get_group()"),
        ("    require_equal_shards(x, mesh, dim)\n", ""),
    ),
    *of(
        "tp",
        "tp/tp.py",
        ("p.grad = None if gradient is None else part_of(gradient, cut, rank)", "p.grad = None"),
        ("    require_equal(whole, mesh.get_group())\n", ""),
        ("around[-1] if around else None", "around[0] if around else None"),
        ("global_norm(parameters, everywhere, copies(model))", "global_norm(parameters, everywhere)"),
    ),
    *of(
        "tp",
        "tp/parallel_layers.py",
        ("self.region and input is self.region.given else", "self.region else"),
        ("return y + self.share(self.bias).to(y.dtype)", "return y + self.share(self.bias)"),
        ("torch.manual_seed(seed * mesh.size() + mesh.get_local_rank())", "torch.manual_seed(seed * mesh.size())"),
    ),
    *of(
        "pp",
        "pp/executor.py",
        ("y = loss.detach(), loss / self.microbatches", "y = loss.detach(), loss / (self.microbatches + 1)"),
        ("(s, m) in self.split else", "(s, m) not in self.split else"),
        ("if s > self.first_trained and x.grad is None", "if s < self.first_trained and x.grad is None"),
        ("        self.tied.add_up()\n", ""),
        ("        self.tied.begin()\n", ""),
        ("        self.mail.end()\n", ""),
        ("for p in self.parameters() if self.tied.is_counted(p)]", "for p in self.parameters()]"),
        ("if trained and not y.requires_grad", "if False and not y.requires_grad"),
    ),
    *of(
        "pp",
        "pp/deferred.py",
        ("        if torch._C._will_engine_execute_node(ctx.stand_in):\n    ", "        if True:\n    "),
        ("x.requires_grad and trained(matrix) and all(map(self.may_wait, trained(matrix)))", "x.requires_grad"),
    ),
    *of(
        "pp",
        "pp/tied.py",
        ("for copy in self.here if copy.trained}", "for copy in self.here}"),
        ("self.shared.get(p, [self.rank])[0] == self.rank", "self.shared.get(p, [self.rank])[-1] != self.rank"),
        ("local(earlier).add_(", "local(earlier).copy_("),
    ),
    *of(
        "pp",
        "pp/messages.py",
        ("x = self.made.pop(step.message).contiguous()", "x = self.made.pop(step.message)"),
        ("if place < knows[rank][to]:", "if place <= knows[rank][to] + 1:"),
    ),
    *of(
        "deepspeed",
        "deepspeed/configuration.py",
        ("accumulation = divided(train, micro * ranks", "accumulation = divided(train, micro"),
        ('return {"gradient_clipping": 0.0,', 'return {"gradient_clipping": 1.0,'),
        ("reduce_dtype = reduce_dtype or param_dtype", "reduce_dtype = reduce_dtype or torch.float32"),
    ),
    *of(
        "deepspeed",
        "deepspeed/saved.py",
        ("if not universal and saved_by != ranks:", "if False:"),
    ),
    *of(
        "gspmd",
        "gspmd/propagation.py",
        ("return min(letters, key=elsewhere)", "return letters[0]"),
        ("if isinstance(placement, Shard) and own[placement.dim] != letter", "if own[0] != letter"),
        ("and value not in graph.results", ""),
        ("value.shape[dim] % (mesh[axis] * there)", "value.shape[dim] % mesh[axis]"),
    ),
    *of(
        "gspmd",
        "gspmd/lowering.py",
        ("            copies[value].add(spec.placements)\n", "            pass\n"),
        ("        return found + [", "        return [*found, *[]] or ["),
    ),
    *of(
        "gspmd",
        "gspmd/tracing.py",
        ("if turned else (value, letters)", "if turned else (value, letters[::-1])"),
    ),
    *of(
        "dtensor",
        "dtensor/dtensor.py",
        ("Replicate() if before.is_partial() and not now.is_partial() else before", "before"),
        ("Redistribute.apply(gradient, without_partial(ctx.placements)).to_local()", "gradient.to_local()"),
        ("if run_check:", "if not run_check:"),
        ("grad_placements or without_partial(x.placements)", "without_partial(x.placements)"),
    ),
    *of(
        "dtensor",
        "dtensor/distribute.py",
        (
            "        local = distribute(local, line, placement, src_data_rank)",
            "        local = distribute(local, line, placement, 0)",
        ),
    ),
    *of(
        "dtensor",
        "dtensor/pointwise.py",
        ("if op._schema.is_mutable or tensors[0].is_contiguous():", "if True:"),
        ("any(placement.is_partial() for placement in first.placements)", "False"),
        (
            "moved = [g if is_plain(g) else g.moved(p.placements) for",
            "moved = [g if is_plain(g) else g._local_tensor for",
        ),
    ),
    *of("dtensor", "dtensor/operation.py", ("if result.shape != out.shape:", "if result.ndim != out.ndim:")),
    *of(
        "dtensor",
        "dtensor/redistribute.py",
        ("local.clone() if line.rank == 0 else torch.zeros_like(local)", "local.clone()"),
        ("for axis in reversed(range(len(now))):", "for axis in range(len(now)):"),
        ("target[axis] if fits(now, target, axis) else Replicate()", "target[axis]"),
        (
            "return (line.ranks - 1) * line.numel(source.dim, target.dim)",
            "return (line.ranks - 1) * line.numel(source.dim)",
        ),
        ("        now[step.axis] = step.target\n", ""),
    ),
    *of(
        "plan",
        "plan/room.py",
        ("(layers[rank], rank == 0,", "("),
        (" and not (setup.config.tied and head_at == 0)", ""),
        ("stages_alive(schedule, pp, rank, m, stages) / stages", "stages_alive(schedule, pp, rank, m, stages)"),
    ),
    *of(
        "plan",
        "plan/dealt.py",
        ("last + head)", "last)"),
        ("2 * pp - 1 - stage", "stage - pp"),
    ),
    *of(
        "plan",
        "plan/pace.py",
        ("max(0.0, m * travels - k.prefetched * compute)", "m * travels"),
        ("6 if recompute in AGAIN else 4", "4"),
        ("all_reduce * rounds / 2", "all_reduce"),
    ),
    *of(
        "plan",
        "plan/machines.py",
        ("local * self.between * reached", "self.between * reached"),
        ("+ OUTER_LATENCY) / local", ") / local"),
    ),
    *of(
        "plan",
        "plan/candidates.py",
        ("if pp > 1 and m < pp:", "if pp > 1 and m < 1:"),
        ("for shards in divisors(dp)[1:-1]", "for shards in divisors(dp)[1:]"),
    ),
    *of(
        "plan",
        "plan/choice.py",
        ("NEAR = 1.01", "NEAR = 1.5"),
        ("feasible.sort(key=lambda each: (each.seconds, each.peak))", "feasible.sort(key=lambda each: each.peak)"),
    ),
    *of(
        "plan",
        "plan/compare.py",
        ("(order.count(value) - 1) / 2", "0"),
        ("if each.peak <= case.setup.cluster.card]", "]"),
    ),
    *of(
        "plan",
        "plan/reasons.py",
        ("    if tp <= node:\n", "    if tp <= 2 * node:\n"),
        ("is (not now_wins)", "is now_wins"),
    ),
]

if __name__ == "__main__":
    main(*sys.argv[1:])
