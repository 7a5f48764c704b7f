"""One job's processes.

team              the ranks as their caller sees them: what has come back, and what is wrong
forkserver        forks them, and ends them and what they leave behind
course            the course's modules, imported before the fork, and anew after an edit
worker            a rank, from its first instant to its last
torchrun          the same where torchrun has started the ranks
payload           how functions and values travel
devices           which device and which backend
output            what the ranks print
link              nodes, and how long what crosses takes
wire              makes it take that long
flight_recorder   what each has called, in memory that can be read while it hangs
diagnosis         who is the cause, and where the others stand
"""
