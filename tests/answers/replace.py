"""Answers to replace (08): a file that has its old text or its new one at every moment, whole."""

import itertools
import random
import secrets
from contextlib import contextmanager

from tests.answers import Exercise

# fmt: off
answers = Exercise("replace")
LINE = (
    "4 calls; in each of the 10 states that a power cut between them may leave, the old text or the new one is there, "
    "whole"
)

# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def by_a_draft(disk, name, text):
    draft = f"{name}.draft"
    disk.write(draft, text)
    disk.flush(draft)
    disk.rename(draft, name)
    disk.flush_names()


WRITE, FLUSH, RENAME, NAMES = (
    "disk.write(draft, text)",
    "disk.flush(draft)",
    "disk.rename(draft, name)",
    "disk.flush_names()",
)
INDENT = "\n    "
answers.vary(by_a_draft, {'f"{name}.draft"': '".tmp"'}, line=LINE)
answers.vary(by_a_draft, {RENAME: f"disk.flush_names(){INDENT}{RENAME}"})
answers.vary(by_a_draft, {NAMES: f"disk.flush(name){INDENT}{NAMES}"})
answers.vary(by_a_draft, {WRITE: f'disk.write(draft, ""){INDENT}{WRITE}'})


@answers.right(line="4 calls")
def with_a_random_word(disk, name, text):
    """And what was left by others is removed when all is done."""
    draft = f"{name}.{secrets.token_hex(4)}.draft"
    disk.write(draft, text)
    disk.flush(draft)
    disk.rename(draft, name)
    disk.flush_names()
    for other in disk.names():
        if other.startswith(f"{name}.") and other.endswith(".draft"):
            disk.remove(other)


@answers.right
def removed_before(disk, name, text):
    draft = "." + name
    if draft in disk.names():
        disk.remove(draft)
        disk.flush_names()
    disk.write(name=draft, text=text)
    disk.flush(name=draft)
    disk.rename(old=draft, new=name)
    disk.flush_names()


@answers.right
def numbered(disk, name, text):
    there = set(disk.names())
    draft = next(each for i in itertools.count() if (each := f"{name}~{i}") not in there)
    disk.write(draft, text)
    disk.flush(draft)
    disk.rename(draft, name)
    for old in sorted(there):
        if old.rpartition("~")[0] == name:
            disk.remove(old)
    disk.flush_names()


@contextmanager
def draft_of(disk, name):
    draft = name + ".new"
    try:
        yield draft
        disk.flush(draft)
        disk.rename(draft, name)
        disk.flush_names()
    finally:
        if draft in disk.names():
            disk.remove(draft)


@answers.right(line=LINE)
def within_a_context(disk, name, text):
    with draft_of(disk, name) as draft:
        disk.write(draft, text)


@answers.right
def by_two_renames(disk, name, text):
    draft, ready = f"{name}.draft", f"{name}.ready"
    disk.write(draft, text)
    disk.flush(draft)
    disk.rename(draft, ready)
    disk.rename(ready, name)
    disk.flush_names()
    for each in (draft, ready):
        if each in disk.names():
            disk.remove(each)


@answers.right
def behind_a_lock(disk, name, text):
    """A lock that a power cut has left is nobody's."""
    disk.write(f"{name}.lock", "")
    by_a_draft(disk, name, text)
    disk.remove(f"{name}.lock")


# ---- wrong: where the text goes --------------------------------------------------------------------------

IN_PLACE, EARLY = "overwritten in place", "renamed before the flush"

spoil = answers.slips(by_a_draft)


def calls(mistake, *lines, **options):
    """All of it in these lines."""
    answers.spoil(by_a_draft, mistake, {INDENT.join((WRITE, FLUSH, RENAME, NAMES)): INDENT.join(lines)}, **options)


calls(IN_PLACE, "disk.write(name, text)")
calls(IN_PLACE, "disk.write(name, text)", "disk.flush(name)", NAMES)
calls(IN_PLACE, WRITE, FLUSH, NAMES, "disk.write(name, text)", "disk.flush(name)", "disk.remove(draft)", NAMES)
calls(IN_PLACE, 'disk.write(name, "")', "disk.write(name, text)", "disk.flush(name)", NAMES)
calls(IN_PLACE, "for n in range(0, len(text) + 1, 8):", "    disk.write(name, text[:n])", "disk.write(name, text)")
calls(IN_PLACE, "disk.flush(name) if name in disk.names() else None", "disk.write(name, text)", NAMES)
calls(EARLY, WRITE, RENAME)
calls(EARLY, WRITE, RENAME, "disk.flush(name)", NAMES)
calls(EARLY, WRITE, NAMES, RENAME, NAMES)
calls(EARLY, WRITE, RENAME, NAMES, "disk.flush(name)")
calls(EARLY, 'disk.write(draft, "")', FLUSH, WRITE, RENAME, NAMES)
calls(EARLY, WRITE, FLUSH, WRITE, RENAME, NAMES)
spoil("another file is flushed", {FLUSH: "disk.flush(name) if name in disk.names() else None"})
spoil("another file is flushed", {FLUSH: "[disk.flush(other) for other in disk.names() if other != draft]"})
spoil("", {FLUSH: "disk.flush(name)"})
spoil("never renamed", {RENAME: "pass"})
spoil("never renamed", {RENAME: 'disk.rename(draft, f"{name}.ready")'})
spoil("renamed the wrong way round", {RENAME: "disk.rename(name, draft)"})
spoil("another text", {WRITE: "disk.write(draft, text[:-1])"})
spoil("another text", {WRITE: 'disk.write(draft, text + "\\n")'})
spoil("another text", {WRITE: "disk.write(draft, text.encode())"})
spoil("another text", {WRITE: "for word in text.split():\n        disk.write(draft, word)"})
calls("nothing is written", "pass")
calls("nothing is written", NAMES)

# ---- wrong: when the names change ------------------------------------------------------------------------

NEVER, TOO_EARLY = "the names are never flushed", "the names are flushed too early"
REMOVED, RENAMED = "the old one is removed first", "the old one is renamed first"
IF_THERE = "if name in disk.names():\n        "

spoil(NEVER, {NAMES: "pass"})
spoil(NEVER, {NAMES: "disk.flush(name)"})
spoil(NEVER, {NAMES: "disk.names()"})
calls(TOO_EARLY, WRITE, FLUSH, NAMES, RENAME)
calls(TOO_EARLY, WRITE, NAMES, FLUSH, RENAME)
spoil(REMOVED, {RENAME: f"{IF_THERE}disk.remove(name){INDENT}{RENAME}"})
spoil(REMOVED, {WRITE: f"{IF_THERE}disk.remove(name){INDENT}{WRITE}"})
calls(REMOVED, WRITE, FLUSH, f"{IF_THERE}disk.remove(name)", NAMES, RENAME, NAMES)
calls(REMOVED, f"{IF_THERE}disk.remove(name)", "disk.write(name, text)", "disk.flush(name)", NAMES)
spoil(RENAMED,
    {RENAME: f'{IF_THERE}disk.rename(name, f"{{name}}.old"){INDENT}{RENAME}',
     NAMES: 'disk.remove(f"{name}.old")'})
calls(RENAMED, f"{IF_THERE}disk.rename(name, draft)", "disk.write(name, text)", "disk.flush(name)", NAMES)
spoil("", {RENAME: f"disk.remove(name){INDENT}{RENAME}"})
calls("right only where the file is there", 'if name not in disk.names():\n        disk.write(name, "")', WRITE,
    FLUSH, RENAME, NAMES)
calls(
    "right only where the file is there",
    "if name not in disk.names():",
    "    disk.write(name, text)",
    "    disk.flush(name)",
    "else:",
    *(f"    {line}" for line in (WRITE, FLUSH, RENAME)),
    NAMES,
)
spoil("right only where there is a text", {WRITE: f"{WRITE}{INDENT}if not text:{INDENT}    return"})

# ---- wrong: what is left, and what a power cut has left --------------------------------------------------

LEFT, STAYS = "a draft is left behind", "what a power cut has left stays"
TAKEN, FAILS = "what a power cut has left is taken for the text", "it fails after a power cut"
GONE = "another file is gone"
DRAFT, THERE, EACH = 'f"{name}.draft"', "if draft in disk.names():", "for other in disk.names():"

spoil(LEFT, {NAMES: f'disk.write(f"{{name}}.done", ""){INDENT}{NAMES}'})
spoil(LEFT, {WRITE: f'disk.write("lock", ""){INDENT}{WRITE}'})
spoil(LEFT, {RENAME: f"{RENAME}{INDENT}{WRITE}"})
spoil(STAYS, {DRAFT: 'f"{name}.{secrets.token_hex(4)}.draft"'})
spoil(STAYS, {DRAFT: 'f"{name}.{len(disk.names())}.draft"'})
spoil(STAYS, {DRAFT: 'f"{name}.{text}"'})
spoil(STAYS, {DRAFT: 'f"{name}.0" if f"{name}.0" not in disk.names() else f"{name}.1"'})
calls(TAKEN, "if draft not in disk.names():", f"    {WRITE}", f"    {FLUSH}", RENAME, NAMES)
calls(TAKEN, THERE, f"    {RENAME}", f"    {NAMES}", "    return", WRITE, FLUSH, RENAME, NAMES)
calls(TAKEN, THERE, f"    {FLUSH}", f"    {RENAME}", WRITE, FLUSH, RENAME, NAMES)
calls(FAILS, THERE, "    raise FileExistsError(draft)", WRITE, FLUSH, RENAME, NAMES)
calls(FAILS, "assert len(disk.names()) <= 3, disk.names()", WRITE, FLUSH, RENAME, NAMES)
calls(FAILS, THERE, "    disk.remove(draft)", f"    {FLUSH}", WRITE, FLUSH, RENAME, NAMES)
calls(GONE, WRITE, FLUSH, RENAME, NAMES, EACH, "    if other != name:", "        disk.remove(other)")
calls(GONE, EACH, "    if name in other[:-1]:", "        disk.remove(other)", WRITE, FLUSH, RENAME, NAMES)
spoil(GONE, {DRAFT: '"rank-0"'})
spoil(GONE, {DRAFT: "[other for other in disk.names() if other != name][-1]"})


@answers.wrong("something is left behind")
def by_chance(disk, name, text):
    draft = f"{name}.{random.randrange(10)}.draft"
    disk.write(draft, text)
    disk.flush(draft)
    disk.rename(draft, name)
    disk.flush_names()
    for i in range(10):
        if f"{name}.{i}.draft" in disk.names():
            disk.remove(f"{name}.{i}.draft")
