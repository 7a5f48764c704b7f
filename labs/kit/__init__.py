"""The laboratory around the textbook: ten faces (the modules that notebooks import) and the folders behind them.

launch     run a function on several ranks, and return the value of each             ranks/, extras/
record     record what each rank of a job sends and holds, and when                  watch/
draw       draw figures of recordings, ledgers and layouts                           drawing/
play       draw figures with sliders                                                 explorers/
check      check a learner's answer to an exercise                                   labs/exercises, learners/
beat       score a learner's answer to an open challenge                             labs/exercises
recall     ask questions on earlier notebooks                                        recall.md
dry        run the code of some ranks of a large job; judge if a job hangs on NCCL   simulated/, nccl/
train      train by any strategy of the course, or by several side by side           training/, rows/
sockets    read how many bytes the operating system has counted on TCP connections

ranks/       the processes of a job, from the fork to the diagnosis of a hang
extras/      packages that are not installed with the course: JAX in a process of its own
watch/       recorders of a rank: its collectives, its tensors' memory, its files, and the lines of code behind them
nccl/        a prediction of whether a recorded job would hang on NCCL
drawing/     pictures from data, from the palette to the timeline
explorers/   pictures with sliders, one per file
training/    a model under a strategy, the table of all strategies, and their training loop
rows/        the rows of the table of strategies, one family of strategies per file
simulated/   a process that runs the code of one rank of a large job, on a simulated device
learners/    the exercises that learners have passed
commands/    python -m labs tour, doctor, progress, challenges, dryrun and plan
"""
