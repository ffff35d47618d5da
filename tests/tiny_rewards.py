"""Rewards of the tiny runs. Nothing heavy is loaded: a contained reward's process imports this module."""


def even_words(completion, prompt):
    """1 for an even number of words, so that every group has both."""
    return float(len(completion.split()) % 2 == 0) + 0.01 * len(completion)


def sparse(completion, prompt):
    """1 for a completion with a rare word: most groups have none."""
    return float(any(word in completion.split() for word in ("w3", "w5", "w9")))


def constant(completion, prompt):
    """The same for everyone: nothing to learn."""
    return 0.5
