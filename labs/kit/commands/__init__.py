"""The commands of the course, python -m labs NAME.

tour     each strategy compared with one process
doctor   can this machine run the course?
dryrun   what a rank of many would hold and send
"""
