# The reservation of a class: fill in these values once, and let everybody read the file before sbatch, in the course's folder:
#   . teaching/reservation.sh
# These variables are stronger than the head of labs/clusters/train.sbatch, and flags of sbatch are stronger than they are.
export SBATCH_ACCOUNT=ACCOUNT
export SBATCH_PARTITION=PARTITION
export SBATCH_RESERVATION=RESERVATION
export SBATCH_TIMELIMIT=10                 # minutes of a job: nobody blocks the class for longer
export RANKS_PER_NODE=4                    # GPUs of a node
export CONTAINER=                          # such as "apptainer exec --nv labs.sif"
export FOLDER="$HOME/checkpoints/class"    # each participant's own, on a disk that all nodes see
export PATH="$PWD/.venv/bin:$PATH"         # the course's torchrun
