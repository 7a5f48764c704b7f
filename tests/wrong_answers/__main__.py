"""The published figure: which share of the wrong answers the checks catch, by numbers drawn anew."""

import sys
from importlib import import_module
from pkgutil import iter_modules

import tests.wrong_answers
from tests.wrong_answers.answers import ANSWERS, tried

for module in iter_modules(tests.wrong_answers.__path__):  # they fill the list
    if module.name != "__main__":
        import_module(f"tests.wrong_answers.{module.name}")

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
