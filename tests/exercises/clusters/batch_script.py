"""Answers to batch_script (11b): the text of a batch script that starts ranks on all nodes of its job."""

from tests.answers import Exercise, from_notebook

answers = Exercise("batch_script")
by_torchrun = answers.right(from_notebook("batch_script"), line="right for both jobs")


# ---- right -----------------------------------------------------------------------------------------------


@answers.right
def by_srun(account, partition, nodes, ranks, minutes, warning):
    return f"""#!/usr/bin/env bash

# The head comes first.
#SBATCH -A {account}
#SBATCH -p {partition}
#SBATCH -N {nodes}
#SBATCH -n {nodes * ranks}
#SBATCH -t {minutes // 60}:{minutes % 60:02}:00
#SBATCH --signal B:SIGUSR1@{warning}
#SBATCH --requeue
set -eu
export MASTER_ADDR=$(hostname) MASTER_PORT=$((20000 + SLURM_JOB_ID))
stopped=
on_signal() {{ stopped=1; touch stop; }}
trap on_signal SIGUSR1
srun --kill-on-bad-exit=1 -l python -u train.py &
training=$!
wait $training || [ "$stopped" ]
if [ "$stopped" ]; then wait $training; scontrol requeue $SLURM_JOB_ID; fi
"""


@answers.right
def by_torchrun_with_numbers_of_nodes(account, partition, nodes, ranks, minutes, warning):
    lines = [f"account={account}", f"partition={partition}", f"nodes={nodes}", f"time={minutes}:00"]
    lines += ["tasks-per-node=1", f"signal=B:10@{warning}", "requeue"]
    run = f"torchrun --nnodes=$SLURM_NNODES --nproc_per_node={ranks} --node_rank=$SLURM_NODEID"
    return "\n".join([
        "#!/bin/sh",
        *(f"#SBATCH --{line}" for line in lines),
        "trap 'touch stop' USR1",
        f"srun bash -c '{run} --master_addr='$SLURMD_NODENAME' train.py' &",
        "until wait $!; do kill -0 $!; done",
    ])  # fmt: skip


# ---- wrong -----------------------------------------------------------------------------------------------

slip = answers.slips(by_torchrun)
slip("sbatch does not take it", "#!/bin/bash\n", "")
slip("a line for sbatch that is a comment", "#SBATCH --time", "# SBATCH --time")
slip("a line for sbatch that is a comment", "#SBATCH --nodes", "module load python\n#SBATCH --nodes")
slip("a line of the head is missing", " --requeue", "")
slip("a line of the head is missing", " --partition={partition}", "")
slip("a line of the head is missing", "--signal=B:USR1@{warning} ", "")
slip("another time limit", "--time={minutes}", "--time=0:{minutes}")
slip("another time limit", "--time={minutes}", "--time={60 * minutes}")
slip("the signal does not reach the script", "B:USR1", "USR1")
slip("another signal, or at another time", "@{warning}", "")
slip("another signal, or at another time", "B:USR1", "B:TERM")
slip("another value than was asked for", "--nodes={nodes}", "--nodes={nodes * ranks}")
slip("the script fails", "train.py &\n", 'train.py " &\n')
slip("only the first node works", "srun torchrun", "torchrun")
slip("only the first node works", "srun torchrun", "echo torchrun")
slip("several torchruns on a node", "--ntasks-per-node=1", "--ntasks-per-node={ranks}")
slip("torchrun does not understand it", "--nproc-per-node", "--ranks-per-node")
slip("each node trains alone", "--nnodes={nodes}", "--nnodes=1")
slip("each node trains alone", "--nnodes={nodes}", "--standalone")
slip("another number of ranks", "--nproc-per-node={ranks}", "--nproc-per-node={nodes * ranks}")
slip("another program", "train.py", "{nodes}.py")
slip("nobody knows where to meet", '--rdzv-endpoint="$HEAD:29500"', "")
slip("not the first host", '"$HEAD:29500"', "localhost:29500")
slip("not the first host", '"$HEAD:29500"', '"$SLURM_JOB_NODELIST:29500"')
slip("not the first host", '"$HEAD:29500"', '"$SLURM_SUBMIT_HOST:29500"')
slip("not the first host", "head -n 1", "tail -n 1")
UNTIL = "until wait $!; do\n    kill -0 $! || exit 1\ndone\n"
slip("the script ends before its training", UNTIL, "")
slip("the signal ends the script", "trap 'touch stop' USR1\n", "")
slip("the handler runs too late", f"train.py &\n{UNTIL}", "train.py\n")
slip("the signal ends the wait, and then the script", UNTIL, "wait\n")
answers.spoil(
    by_srun,
    "another meeting on each node",
    {"python -u train.py": "bash -c 'MASTER_PORT=$((29500 + SLURM_NODEID)) python train.py'"},
)
slip(
    "another meeting on each node",
    "srun torchrun",
    'export HEAD; srun bash -c "torchrun',
    '"$HEAD:29500" --rdzv-id="$SLURM_JOB_ID" train.py',
    r'\\$HEAD:29500 --rdzv-id=\\$SLURM_NODEID train.py"',
)
answers.spoil(by_srun, "another number of ranks", {"-n {nodes * ranks}": "-n {nodes}"})
answers.spoil(by_srun, "nobody knows where to meet", {" MASTER_PORT=$((20000 + SLURM_JOB_ID))": ""})
answers.spoil(by_srun, "nobody knows where to meet", {"export ": ""})
answers.spoil(
    by_torchrun_with_numbers_of_nodes,
    "each node names itself",
    {"'$SLURMD_NODENAME'": "$SLURMD_NODENAME"},
)
answers.spoil(
    by_torchrun_with_numbers_of_nodes, "every node says that it is the first", {" --node_rank=$SLURM_NODEID": ""}
)


@answers.wrong("not the text of a script")
def as_lines(account, partition, nodes, ranks, minutes, warning):
    return by_srun(account, partition, nodes, ranks, minutes, warning).splitlines()


@answers.wrong("not the text of a script")
def nothing(account, partition, nodes, ranks, minutes, warning):
    pass
