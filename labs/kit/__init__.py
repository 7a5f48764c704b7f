"""The laboratory around the textbook, and not on the exam: six modules that notebooks import, and what is behind them.

launch     run a function on several ranks, and bring back what each returned        ranks/
record     watch a rank from outside: what it sent, what it held, when               watch/
draw       figures of recordings, ledgers and layouts                                drawing/
play       the same with sliders                                                     explorers/
check      run a learner's answer, and say what is right or what differs             checks/
beat       the same where it is open: score it                                       challenges/

ranks/       one job's processes, from the fork to the diagnosis of a hang
watch/       what passes by on a rank: collectives, storages, and whose line it was
nccl/        what NCCL would make of a recording: would it hang?
drawing/     from data to a picture, from the palette to the timeline
explorers/   one picture with sliders per file
checks/      what each exercise is put through, and the mistakes that are known by name
challenges/  what is open in each notebook: judged, scored, and remembered
rows/        the table of strategies, one family per file
dry/         one process as any rank of any number, on a device that only pretends

budget       a job that must fit in so much memory
virtual      a function where JAX has as many devices as are asked for
optional     a notebook whose extra is missing says so, and its cells pass
sockets      what the system counted on the connections
training     a model under a strategy, and a step of it
strategies   the table of strategies, ours and PyTorch's, and the training loop that they share      rows/
side_by_side several strategies in one job, on the same batches
progress     which exercises a learner has passed
recall       questions on earlier notebooks, and their answers (recall.md)
exercises    a learner's functions in place of the course's own
tour         each strategy against one process
doctor       can this machine run the course?
"""
