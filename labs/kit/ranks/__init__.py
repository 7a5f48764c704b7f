"""The processes of one job.

team              the ranks as their caller sees them: the answers so far, and the failures
forkserver        a process that forks the ranks, and ends them and every process that they leave behind
course            the course's modules, imported before the fork, and again after an edit
worker            a rank, from its first instant to its last
torchrun          a rank that torchrun has started
payload           the serialization of functions and values between the caller and its ranks
devices           the choice of device and backend
output            the lines that the ranks print
link              nodes, and a formula for the time of a transfer between them
wire              the delay that makes a transfer take that time
flight_recorder   a record of each rank's calls, in memory that can be read while the rank hangs
diagnosis         the ranks that caused a failure, and the line on which each of the others stands
"""
