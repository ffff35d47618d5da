"""reasoning-gym's own score of a completion, as a reward function: some of its scorers evaluate what they are given
("9**9**9**9" as a countdown answer runs for ever), so they are called as a user's reward is."""

from __future__ import annotations

import logging
import pickle
from functools import lru_cache
from typing import Any

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS, create_dataset
from reasoning_gym.utils import extract_answer

logger = logging.getLogger(__name__)

SPEC = f"{__name__}:own_score"
# Their scorers only compare decimal numbers.
COMPARES = {"chain_sum", "products"}


def is_plain(name: str) -> bool:
    """Whether a dataset's scorer only compares texts or numbers."""
    return name in COMPARES or DATASETS[name][0].score_answer is ProceduralDataset.score_answer


def own_score(completion: str, prompt: dict[str, Any]) -> float:
    """The dataset's score of the text in <answer> tags, or else of all of it.

    Args:
        prompt: `dataset` and its `options`, the `entry`, and an `id`.
    """
    answer = extract_answer(completion) or completion.strip()
    dataset = _dataset(prompt["dataset"], pickle.dumps(prompt["options"]))
    try:
        return float(dataset.score_answer(answer, prompt["entry"]))
    except MemoryError:
        raise
    # Some of its scorers (prime_factorization, boxnet) raise whatever their parsing meets in a text that
    # is no answer at all; sampled text is like that, and it scores as a wrong answer.
    except Exception as error:
        logger.debug("%s: scorer raised %r on %r", prompt["id"], error, answer[:80])
        return 0.0


@lru_cache(maxsize=4)
def _dataset(name: str, options: bytes) -> Any:
    return create_dataset(name, seed=0, size=1, **pickle.loads(options))
