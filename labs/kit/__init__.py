"""The laboratory around the textbook, which is not on the exam: six modules that notebooks import, and their parts.

launch     run a function on several ranks, and return the value of each             ranks/
record     record from outside what a rank sends and holds, and when                 watch/
draw       draw figures of recordings, ledgers and layouts                           drawing/
play       draw figures with sliders                                                 explorers/
check      run a learner's answer to an exercise, and say what is right or differs   labs/exercises
beat       score a learner's answer to an open challenge                             labs/exercises

ranks/       the processes of a job, from the fork to the diagnosis of a hang
watch/       observers of a rank: its collectives, its storages, and the lines of code that made them
nccl/        a prediction whether a recorded job would hang on NCCL
drawing/     pictures from data, from the palette to the timeline
explorers/   pictures with sliders, one per file
rows/        the table of strategies, one family per file
dry/         one process that acts as any rank of a job, on a simulated device

budget       jobs with a limit on memory
virtual      functions in a process in which JAX has any number of devices
optional     notebooks whose extra is missing: they say so, and their cells pass
sockets      the bytes that the system counted on the connections
training     a model under a strategy, and one step of it
strategies   the table of strategies, ours and PyTorch's, and the training loop that they share      rows/
side_by_side several strategies in one job, on the same batches
progress     the exercises that a learner has passed
standings    what learners have passed and scored, printed
recall       questions on earlier notebooks, and their answers (recall.md)
exercises    a learner's functions in place of the course's own
tour         each strategy compared with one process
doctor       can this machine run the course?
"""
