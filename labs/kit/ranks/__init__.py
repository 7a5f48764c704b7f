"""The processes of one job.

run                 the call that starts a job on several ranks and returns their values
team                all ranks of a job as their caller sees them: their values and their failures
forkserver          a process that forks the ranks, and ends them and every process that they leave behind
forkserver_preload  the course's modules, imported before the fork, and again after an edit
worker              the code of one rank, from the fork to its exit
torchrun            the code of a rank that torchrun has started
slurm               jobs in the queue of a Slurm cluster: what is asked of it, and the submission
slurm_job           a submitted job, as its caller follows it to the end
slurm_rank          the code of a rank that Slurm has started
shared_folder       the folder that caller and ranks on other hosts share: who may write there, and who has what version
payload             the serialization of functions and values between the caller and its ranks
torch_settings      the settings of PyTorch that ranks copy from the caller
devices             the choice of device and backend
output              the lines that the ranks print
link                the links between nodes: a formula for the seconds of a transfer between nodes
link_delay          the delay that makes a real transfer between nodes take these seconds
flight_recorder     a record of each rank's collectives, in memory that can be read while the rank hangs
diagnosis           the ranks that caused a failure, and the line on which every other rank stands
"""
