# %% [markdown]
# # Clusters: the same job on a laptop, on two hosts and in a queue
#
# *A training runs on your laptop. Now it shall run on two machines that belong to many people. What changes, and what
# must stay the same?*
#
# **Minutes**, by estimate: 20 without exercises, 60 with them.
# Running all cells takes a minute and 2 GB of memory. You need: [Resume](08b_resume.ipynb) and [Three
# dimensions](11_three_dimensions.ipynb). You need no cluster.
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

# %%
from labs.kit import recall

recall.ask("11b")

# %%
import io
import math
import re
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

# %%
from labs.clusters.settings import Checkpoints, Settings
from labs.clusters.trainer import train
from labs.kit import check, draw
from labs.kit.launch import Link, RankError, run
from labs.mesh import Mesh

# %% [markdown]
# ## Question
#
# The course has a trainer, `python -m labs train`, and a training is a value of its dataclass `Settings`. The next cell
# trains for two steps on four ranks of this machine. `quiet` drops the progress lines.

# %%
FOLDER = tempfile.TemporaryDirectory()
TRAINING = Settings(strategy="fsdp", mesh="dp=4", model="tiny", batch=16, sample=0)


def training(name, **changes):
    """Return the settings with these changes, and with a new folder for checkpoints."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=FOLDER.name))
    return replace(TRAINING, checkpoints=Checkpoints(folder), **changes)


def quiet(settings):
    with redirect_stdout(io.StringIO()):
        return train(settings)


done = run(quiet, training("here", steps=2), ranks=4, device="cpu")
print(f"{len(done)} ranks took {done[0].step} steps")

# %% [markdown]
# On a cluster, the function and the settings stay as they are. Four things change, and each can go wrong:
#
# | | on a laptop | on a cluster |
# |---|---|---|
# | what starts the ranks | `run` | torchrun on each host, or Slurm |
# | how ranks find each other | on this machine | by the name and port of the first host |
# | the links | all alike | quick inside of a host, slow between hosts |
# | the end | when the training is done | when the time limit is over |
#
# > **What went wrong in the wild.** *Symptom*: a job on two nodes with 16 ranks started, failed and started again, and
# > the last error was about a lost actor of another library. *Cause*: much earlier in the log, rank 8 tried to reach
# > the other ranks at 127.0.0.1. PyTorch's gloo binds to the address that the host's own name stands for, and on these
# > hosts the name stood for the loopback address, so each rank told the others an address that only its own host can
# > reach. The mending line set `GLOO_SOCKET_IFNAME`, the interface to use
# > ([aws-do-eks#69](https://github.com/aws-samples/aws-do-eks/pull/69), August 2026).
#
# ## Picture
#
# <img src="../images/cluster.svg" alt="Two nodes of a cluster. Each has eight GPUs, joined by quick links inside of the
# node, and a slower link to the other node.">
#
# You know this picture from the first notebook. Everything below asks the same of it: what crosses the link in the
# middle?
#
# ## Predict
#
# The same training can run on four ranks by five layouts. Two hosts have two ranks each, so the first axis of a mesh
# crosses from host to host, and `dp=4` or `tp=4` do, too. Which layout sends the fewest bytes between the hosts, and
# how many times as many bytes does `tp=4` send between them as `dp=4`? The model is tiny: a step has 16 sequences.

# %%
LAYOUTS = {
    "fsdp": "dp=4",
    "hsdp": "replicate=2,shard=2",
    "fsdp-tp": "dp=2,tp=2",
    "tp": "tp=4",
    "pp-fsdp": "pp=2,dp=2",
}
print(*(f"{n} {name} on {mesh}" for n, (name, mesh) in enumerate(LAYOUTS.items())), sep="\n")
guess_fewest = 4  # your number
guess_times = 4  # your number

# %% [markdown]
# ## Measure the links first
#
# Whoever comes to a new cluster should first measure its links. Here `Link` stands for the link between two hosts:
# ranks 0 and 1 are one host, ranks 2 and 3 the other, and every message between them waits as on a wire of 200 Mbit/s
# with a latency of 1 ms. The next cell measures an all-reduce of 1 MB, and of a single number, along an axis inside of
# a host and along one between the hosts.

# %%
LINK = Link(nodes=2, bandwidth="200 Mbit/s", latency=1e-3)


def measure_links():
    """Return the least seconds of five all-reduces, by axis and number of elements."""
    mesh, took = Mesh((2, 2), ("between", "inside")), {}
    for axis in ("between", "inside"):
        for size in (1, 250_000):
            x, times = torch.zeros(size), []
            for _ in range(5):
                dist.barrier()
                begin = time.perf_counter()
                dist.all_reduce(x, group=mesh.get_group(axis))
                times.append(time.perf_counter() - begin)
            took[axis, size] = min(times)
    return took


# %%
took = run(measure_links, ranks=4, device="cpu", link=LINK, tell="measuring")[0]
for axis in ("inside", "between"):
    small, large = took[axis, 1], took[axis, 250_000]
    print(f"{axis}: one number takes {1000 * small:.1f} ms, 1 MB takes {1000 * large:.0f} ms")

# %% [markdown]
# In an all-reduce over two ranks, each sends as many bytes as the tensor has. So 1 MB at 200 Mbit/s takes 8 / 200 s =
# 40 ms. If a measured time is much longer than that of the link which you were promised, then ask which interface is in
# use before you change the training. On a cluster, `python -m labs doctor` in a job, and `NCCL_DEBUG=INFO`, say so.
#
# ## Which axis goes across?
#
# Now the trainer runs by each layout, with this link between the hosts, and a recording counts the bytes that leave the
# first host in the second step. (In the first step some strategies compare their inputs, once.)


# %%
def leaving(name, mesh):
    """Return the bytes that leave the first host in a steady step, and the losses."""
    settings = training(name, strategy=name, mesh=mesh, steps=2)
    options = {"ranks": 4, "device": "cpu", "record": "communication", "tell": name}
    done = run(quiet, settings, link=LINK, **options)
    return sum(done.recording.across(rank, 1) for rank in (0, 1)), done[0].losses


found = {name: leaving(name, mesh) for name, mesh in LAYOUTS.items()}
across = {name: sent for name, (sent, _) in found.items()}
for _, losses in found.values():
    assert torch.allclose(torch.tensor(losses), torch.tensor(found["fsdp"][1]), atol=1e-4)
print(f"{len(found)} layouts, the same losses")

# %%
rows = []
for name, sent in across.items():
    on_wire = 1000 * 8 * sent / LINK.bandwidth
    row = {"strategy": name, "mesh": LAYOUTS[name], "leave a host, bytes": sent}
    rows.append(row | {"at least, on the wire": f"{on_wire:.0f} ms"})
fewest = min(range(len(rows)), key=lambda n: rows[n]["leave a host, bytes"])
why = "only activations at one border between stages, and their gradients, cross"
ask = "Which layout sends the fewest bytes between hosts?"
print(check.predict(ask, guess_fewest, fewest, tolerance=0, reason=why))
times = round(across["tp"] / across["fsdp"], 1)
print(check.predict("tp=4 sends, times as many as dp=4:", guess_times, times, tolerance=0.4))
draw.table(rows)

# %% [markdown]
# So the order of notebook 11 is confirmed by the trainer itself: pipeline stages or replicas go between hosts, and
# tensor parallelism stays inside. The losses are the same, so a wrong layout makes no error. It is only slow. And the
# answer depends on the job: with a larger batch, `tp` and `pp` send more, and `dp` does not.
#
# For a cluster that you do not have yet, `python -m labs train FILE --dry` predicts the bytes of each axis, and `--plan
# --card H100` lists the layouts that fit.
#
# ## In a queue
#
# On a cluster with Slurm, `run` submits the same call as a job, and brings back each rank's value. If you have one,
# write `Slurm(nodes=2, folder="~/jobs")`, which you import from `labs.kit.launch`, in place of `None`; the folder must
# be one that all hosts share. Otherwise the ranks run on this machine.

# %%
QUEUE = None


def where():
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


print(run(where, ranks=4, device="cpu", on=QUEUE))

# %% [markdown]
# **A recorded run.** With `on=Slurm(nodes=2, folder=…)`, and a `where` that also returns the name of its host, the cell
# printed what follows. It was recorded on a small cluster: a real Slurm with two nodes, n1 and n2, both on one machine.
#
#     Slurm job 1 is queued … 1 s
#     Slurm job 1 runs on n[1-2]
#     ['rank 0 on n1', 'rank 1 on n1', 'rank 2 on n2', 'rank 3 on n2']
#
# Slurm writes lists of nodes in short, as `n[1-2]`. It starts each rank as a process, a *task*, and tells it by
# variables who it is. Whoever joins ranks to a process group on a cluster has to read these.
#
# ### Exercise 1: who am I, and who is first? (10 minutes)
#
# Return what PyTorch needs. The node with the first name of the list is where rank 0 runs, and where the others look
# for it. A list may be `login1`, `n1,m[2-3]`, `n[01-03,7]`, `gpu-a[09-11]`, `rack[1-2]n5` or `rack[03-04]n[07,09]`: the
# first names are login1, n1, n01, gpu-a09, rack1n5 and rack03n07. On a cluster `scontrol show hostnames` expands a
# list, but a container often has no `scontrol`.


# %%
def ranks_from_slurm(environ):
    """Return a dictionary with the keys rank, local_rank, world_size (numbers), and head, the
    first host's name.

    environ: the variables of this process, a dictionary of strings like os.environ. Among them
        SLURM_PROCID is the number of this task in the job, and SLURM_LOCALID on its node.
        SLURM_NTASKS counts all tasks, and SLURM_NNODES the nodes, which may have different
        numbers of tasks. SLURM_JOB_NODELIST is the list of all nodes, SLURMD_NODENAME this one.
    """
    ### BEGIN SOLUTION
    nodes = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", environ["SLURM_JOB_NODELIST"])
    return {
        "rank": int(environ["SLURM_PROCID"]),
        "local_rank": int(environ["SLURM_LOCALID"]),
        "world_size": int(environ["SLURM_NTASKS"]),
        "head": nodes.partition(",")[0],
    }
    ### END SOLUTION


check.ranks_from_slurm(ranks_from_slurm)

# %% [markdown]
# ## Read a failed job's report
#
# A job on a cluster fails while you are not looking, and leaves many lines. Read the *first* error by time; the others
# follow from it. Here rank 2 finds a bad token, and the others wait for it:


# %%
def one_fails():
    if dist.get_rank() == 2:
        raise ValueError("no such token")
    dist.barrier()


try:
    run(one_fails, ranks=4, device="cpu")
except RankError as error:
    first, *_, last = str(error).strip().splitlines()
    print(first, last, sep="\n")

# %% [markdown]
# **A recorded run** of the same function in the small cluster's queue. Between the first line and the last two there is
# the traceback of rank 2, with the line that raised:
#
#     rank 2 of 4 failed: ValueError: no such token
#     …
#     ranks 0, 1 and 3 then had to stop.
#     rank 2 ran on n2.
#
# The report has three answers: which rank failed first, on which line, and on which host. If the same host is named
# again and again, with different lines, then suspect the host. If the rank and line stay, and the host changes, then
# suspect the code or the data.
#
# ## A job that meets its time limit
#
# A queue gives a job some minutes or hours, and then ends it. The batch script of the course asks Slurm for a signal
# two minutes before the limit, and then makes a file `stop` in the folder of checkpoints. The trainer looks for it
# after each step, saves, and ends; the script puts the job back into the queue, and the next start goes on. The next
# cell does the same by hand: `stop` is there from the beginning, so the first start ends after one step.

# %%
undisturbed = run(quiet, training("undisturbed", steps=8), ranks=4, device="cpu")[0]

settings = training("stopped", steps=8)
stop = settings.checkpoints.folder / "stop"
stop.touch()
first = run(quiet, settings, ranks=4, device="cpu")[0]
stop.unlink()
second = run(quiet, settings, ranks=4, device="cpu")[0]
assert first.losses + second.losses == undisturbed.losses
print(f"stopped after step {first.step}, went on to step {second.step}: the same losses")

# %% [markdown]
# The losses are equal to the last bit, as in notebook 08b. But the signal may not come: a site's limit may be shorter
# than a save, or a node may be lost. So a training should save now and then, too.
#
# ### Exercise 2: when to save before a limit (15 minutes)
#
# Notebook 08b derived √(2δM) for a training that goes on for ever. Here the job is ended at its limit, L seconds after
# its start, and no signal comes. What it did after its last save is lost, so the last save must *end* at the limit.
# Hence L holds a whole number n of intervals of training, each followed by a save of δ seconds: L = n (T + δ). By
# saving, the job loses n δ seconds. It has r L / 3600 interruptions, if r is their number per hour, and each loses
# T / 2 on average. Return the T of the n that loses least.


# %%
def save_interval(limit, saving, rate):
    """Return the seconds of training between two saves, T in the text.

    limit: the seconds after which the job is ended
    saving: the seconds that training waits in a save, less than the limit
    rate: interruptions per hour; 0 if there are none
    """
    ### BEGIN SOLUTION
    best, least = None, math.inf
    for saves in range(1, math.ceil(limit / saving)):
        interval = limit / saves - saving
        lost = saves * saving + rate * limit / 3600 * interval / 2
        if lost < least:
            best, least = interval, lost
    return best
    ### END SOLUTION


answer = check.save_interval(save_interval)
answer

# %%
best = save_interval if answer.ok else check.save_interval.expected
rows = []
for hours in (0.5, 2, 12, 48):
    interval = best(3600 * hours, 60, 0.1)
    saves = round(3600 * hours / (interval + 60))
    row = {"limit, hours": hours, "saves": saves, "minutes between": round(interval / 60, 1)}
    rows.append(row | {"√(2δM), minutes": round(math.sqrt(2 * 60 * 36_000) / 60, 1)})
draw.table(rows)

# %% [markdown]
# With a short limit, the limit decides; with a long one, √(2δM) is nearly right again. The same holds for the signal:
# its lead, 120 s in the course's script, must be longer than a step and a save together.
#
# ## Native: torchrun, and a batch script
#
# On two hosts without a queue, run one command on each. Both need the same files at the same place, and HOST1 is the
# name of the first host:
#
#     torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST1:29500 --rdzv-id 1 \
#         -m labs train configs/fsdp.toml
#
# The two torchruns meet at HOST1's port, the *rendezvous*, and give each rank its number. The course's tests run this
# on two hosts that are two network namespaces of one machine; the numbers equal those of one process.
#
# In a queue, [train.sbatch](../labs/clusters/train.sbatch) runs the same torchrun on each node. It is some thirty
# lines. Read it, and find the line for each row of this table:
#
# | line | without it |
# |---|---|
# | `--ntasks-per-node=1` | several torchruns per node, each of which starts all of the node's ranks |
# | `--signal=B:USR1@120` | the limit comes without a warning; without `B:` the script itself gets no signal |
# | `HEAD=…` | nobody knows where to meet |
# | `--rdzv-id "$SLURM_JOB_ID"` | two jobs on one host may meet each other |
# | `&`, then `wait` | bash handles the signal only after the training has ended |
# | `scontrol requeue` | a training that has saved waits for you |
#
# ### Exercise 3: a batch script (15 minutes)
#
# Write the script for a training that is called `train.py`. Here it is with blanks:
#
#     #!/bin/bash
#     #SBATCH ____              six or seven options: sbatch reads them, up to the first command
#     HEAD=____
#     trap ____ USR1            such as 'touch stop', if train.py looks for that file after each step
#     srun ____ train.py &      one torchrun per node, or all ranks by srun itself
#     until wait $!; do         the signal ends `wait`, but not the training
#         kill -0 $! || exit 1  the training has failed
#     done
#
# If srun starts the ranks itself, then each rank needs the variables `MASTER_ADDR` and `MASTER_PORT`. The check runs
# your script on this machine, with stand-ins for `srun`, `torchrun`, `python`, `scontrol` and `hostname`. It looks at
# what starts on which node, and sends the script USR1 while `srun` runs. If this machine has Slurm, `sbatch
# --test-only` reads the script, too. Nothing is submitted.


# %%
def batch_script(account, partition, nodes, ranks, minutes, warning):
    """Return the text of a batch script for a job that Slurm may put back into the queue.

    account, partition: whose budget pays, and the queue
    nodes, ranks: the number of nodes, and of ranks on each node
    minutes: the time limit
    warning: the seconds before the limit at which the script itself gets the signal USR1
    """
    ### BEGIN SOLUTION
    head = f"""#!/bin/bash
#SBATCH --account={account} --partition={partition}
#SBATCH --nodes={nodes} --ntasks-per-node=1
#SBATCH --time={minutes}
#SBATCH --signal=B:USR1@{warning} --requeue
"""
    body = f"""HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
trap 'touch stop' USR1
srun torchrun --nnodes={nodes} --nproc-per-node={ranks} --rdzv-backend=c10d \\
    --rdzv-endpoint="$HEAD:29500" --rdzv-id="$SLURM_JOB_ID" train.py &
until wait $!; do
    kill -0 $! || exit 1
done
"""
    return head + body
    ### END SOLUTION


check.batch_script(batch_script)

# %% [markdown]
# [CLUSTERS.md](../CLUSTERS.md) has ten steps from a laptop to a cluster, what to ask of your administrator, and a
# manifest for Kubernetes.
#
# ## Why, and why not
#
# | method | advantage | price |
# |---|---|---|
# | `run(…, on=Slurm(…))` | values and errors come back into the notebook | the notebook must stay open |
# | a batch script | goes on by itself after each limit | its output is a file |
# | torchrun on each host | no queue is needed | you start, watch and end each host |
#
# **Why not** ask for the longest limit? Short jobs start earlier, since they fit into gaps of the queue's plan. A
# training that resumes exactly may be cut into any number of them.
#
# ## Say it back
#
# Answer each question aloud before you unfold its answer.
#
# <details><summary>A training is as quick on two hosts as on one, and not twice as quick. What do you look at
# first?</summary>
#
# Measure the links along each axis, then count the bytes that cross in a step. Bytes by bandwidth is the least time on
# the wire. If the measured bandwidth is not the promised one, the wrong interface may be in use.
# </details>
#
# <details><summary>All ranks of two hosts wait at the start until the timeout. Which names and addresses do you
# compare?</summary>
#
# Compare the host that each torchrun was told for the rendezvous, which must be the same, and the address that each
# host's own name stands for, which must not be 127.0.0.1.
# </details>
#
# <details><summary>Why must a batch script start the training in the background, and wait for it?</summary>
#
# Bash runs the handler of a signal only when the command in the foreground has ended. `wait` is ended by the signal, so
# the handler runs while the training goes on.
# </details>
#
# | | predicted | ours |
# |---|---|---|
# | fewest bytes between hosts | pipeline stages across | `pp=2,dp=2` |
# | losses of five layouts | the same | the same |
# | a training that was stopped, and went on | the same numbers | bit for bit |

# %%
FOLDER.cleanup()

# %% [markdown]
# **Read on**: [labs/clusters/trainer.py](../labs/clusters/trainer.py), which can be read in one sitting, then
# [labs/clusters/settings.py](../labs/clusters/settings.py).
#
# **Next.** What is still unsolved: no strategy so far cuts a sequence in attention, so each sequence must fit on the
# ranks of one TP group. What if it has a hundred thousand tokens? [Long contexts](12_long_context.ipynb).
#
# To get a clean copy of this notebook, run `git restore notebooks/11b_clusters.ipynb`, and then choose *File > Reload
# Notebook from Disk*.
