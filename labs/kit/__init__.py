"""The laboratory around the textbook, which is not on the exam: ten faces, which notebooks import, and what they use.

launch     run a function on several ranks, and return the value of each             ranks/, extras/
record     record from outside what a rank sends and holds, and when                 watch/
draw       draw figures of recordings, ledgers and layouts                           drawing/
play       draw figures with sliders                                                 explorers/
check      run a learner's answer to an exercise, and say what is right or differs   labs/exercises, learners/
beat       score a learner's answer to an open challenge                             labs/exercises
recall     ask questions on earlier notebooks                                        recall.md
dry        act as some ranks of many, and judge whether a job would hang on NCCL     simulated/, nccl/
train      train by any strategy of the course, or by several side by side           training/, rows/
sockets    read how many bytes the system counted on the connections

ranks/       the processes of a job, from the fork to the diagnosis of a hang
extras/      JAX in a process of its own, and notebooks whose extra is missing
watch/       observers of a rank: its collectives, its storages, its files, and the lines of code that made them
nccl/        a prediction whether a recorded job would hang on NCCL
drawing/     pictures from data, from the palette to the timeline
explorers/   pictures with sliders, one per file
training/    a model under a strategy, the table of all strategies, and the loop that they share
rows/        the rows of that table, one family per file
simulated/   one process that acts as any rank of a job, on a simulated device
learners/    what learners have passed and scored
commands/    python -m labs tour, doctor and dryrun
"""
