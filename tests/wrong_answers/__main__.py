"""The published figure: which share of the wrong answers the checks catch, by numbers drawn anew."""

import sys

from tests.wrong_answers import collectives, fsdp, gradients, memory, mesh, messages, pipeline, precision, tensor, zero  # noqa: F401  (they fill the list)
from tests.wrong_answers.answers import ANSWERS, tried

checks = sys.argv[1:] or dict.fromkeys(answer.check for answer in ANSWERS)
caught, of = 0, 0
for check in checks:
    found = [pair for listed in (True, False) for pair in tried(check, listed, seed=None)]
    for wrong, answer in found:
        if not wrong.caught(answer):
            print(f"{wrong.functions[0].__name__}, which should be called {wrong.mistake!r}:\n{answer}\n")
    right = sum(wrong.caught(answer) for wrong, answer in found)
    print(f"{check:20} {right} of {len(found)}", flush=True)
    caught, of = caught + right, of + len(found)
print(f"{'all':20} {caught} of {of}")
