"""A reward that does what the completion says, as Python: every way in which a reward can go wrong."""

import os
import time
from pathlib import Path

KEPT = []


def obey(completion, prompt):
    """The length of a completion, after running it where it begins with `!`."""
    if completion.startswith("!"):
        exec(completion[1:], globals())
    return float(len(completion))


def leaky(completion, prompt):
    """Keeps 60 MB a call: innocent alone, out of memory after a few."""
    KEPT.append(bytearray(60 << 20))
    return 1.0


def shy(completion, prompt):
    """Fails on the empty completion."""
    return completion.split()[-1] == "w3"


def hangs_on_even(completion, prompt):
    """Sleeps for ever on an even number of words."""
    words = len(completion.split())
    while words and words % 2 == 0:
        time.sleep(1)
    return float(words)


def raises_on_even(completion, prompt):
    """Raises on an even number of words, 1 for an odd one."""
    words = len(completion.split())
    return 1.0 if words % 2 else 1 / (words % 2 or not words)


def none_but_nothing(completion, prompt):
    """Scores the empty completion alone."""
    if completion:
        raise ValueError("no")
    return 0.0


def writes(completion, prompt):
    """Writes where it runs, and says whether an earlier call left something there."""
    left = os.listdir(".")
    Path("out.txt").write_text(completion)
    return float(len(left))


def tells_its_parents(completion, prompt):
    """Its process and its template's, into the file that the prompt names; then hangs if it is told to."""
    if completion:
        with open(prompt["file"], "a") as file:
            file.write(f"{os.getpid()} {os.getppid()}\n")
    while completion == "hang":
        time.sleep(1)
    return 1.0
