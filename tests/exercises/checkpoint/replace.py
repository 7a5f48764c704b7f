"""Answers to replace (08): a file that has its old text or its new one at every moment, whole."""

import secrets  # noqa: F401 (varied answers use it)

from tests.answers import Exercise, from_notebook

# fmt: off
answers = Exercise("replace")
LINE = (
    "4 calls; in each of the 10 states that a power cut between them may leave, the old text or the new one is there, "
    "whole"
)

# ---- right -----------------------------------------------------------------------------------------------

by_a_draft = answers.right(from_notebook("replace"), line=LINE)


WRITE, FLUSH, RENAME, NAMES = (
    "disk.write(draft, text)",
    "disk.flush(draft)",
    "disk.rename(draft, name)",
    "disk.flush_names()",
)
INDENT = "\n    "
answers.vary(by_a_draft, {'f"{name}.draft"': '".tmp"'}, line=LINE)
# ---- wrong: where the text goes --------------------------------------------------------------------------

IN_PLACE, EARLY = "overwritten in place", "renamed before the flush"

spoil = answers.slips(by_a_draft)


def calls(mistake, *lines, **options):
    """All of it in these lines."""
    answers.spoil(by_a_draft, mistake, {INDENT.join((WRITE, FLUSH, RENAME, NAMES)): INDENT.join(lines)}, **options)


calls(IN_PLACE, "disk.write(name, text)")
calls(EARLY, WRITE, RENAME)
spoil("another file is flushed", {FLUSH: "disk.flush(name) if name in disk.names() else None"})
spoil("never renamed", {RENAME: "pass"})
spoil("renamed the wrong way round", {RENAME: "disk.rename(name, draft)"})
spoil("another text", {WRITE: "disk.write(draft, text[:-1])"})
calls("nothing is written", "pass")

# ---- wrong: when the names change ------------------------------------------------------------------------

NEVER, TOO_EARLY = "the names are never flushed", "the names are flushed too early"
REMOVED, RENAMED = "the old one is removed first", "the old one is renamed first"
IF_THERE = "if name in disk.names():\n        "

spoil(NEVER, {NAMES: "pass"})
calls(TOO_EARLY, WRITE, FLUSH, NAMES, RENAME)
spoil(REMOVED, {RENAME: f"{IF_THERE}disk.remove(name){INDENT}{RENAME}"})
spoil(RENAMED,
    {RENAME: f'{IF_THERE}disk.rename(name, f"{{name}}.old"){INDENT}{RENAME}',
     NAMES: 'disk.remove(f"{name}.old")'})
calls("right only where the file is there", 'if name not in disk.names():\n        disk.write(name, "")', WRITE,
    FLUSH, RENAME, NAMES)
spoil("right only where there is a text", {WRITE: f"{WRITE}{INDENT}if not text:{INDENT}    return"})

# ---- wrong: what is left, and what a power cut has left --------------------------------------------------

LEFT, STAYS = "a draft is left behind", "what a power cut has left stays"
TAKEN, FAILS = "what a power cut has left is taken for the text", "it fails after a power cut"
GONE = "another file is gone"
DRAFT, THERE, EACH = 'f"{name}.draft"', "if draft in disk.names():", "for other in disk.names():"

spoil(LEFT, {NAMES: f'disk.write(f"{{name}}.done", ""){INDENT}{NAMES}'})
spoil(STAYS, {DRAFT: 'f"{name}.{secrets.token_hex(4)}.draft"'})
calls(TAKEN, "if draft not in disk.names():", f"    {WRITE}", f"    {FLUSH}", RENAME, NAMES)
calls(FAILS, THERE, "    raise FileExistsError(draft)", WRITE, FLUSH, RENAME, NAMES)
calls(GONE, WRITE, FLUSH, RENAME, NAMES, EACH, "    if other != name:", "        disk.remove(other)")
