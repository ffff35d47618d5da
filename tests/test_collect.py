import pytest
import torch

from lowbitrl import collect
from lowbitrl.collect import Samples
from lowbitrl.rollout import Completion
from lowbitrl.tasks import Prompt
from tests.tiny_run import config


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_scorer_that_applies_to_some_prompts_is_averaged_over_those(tmp_path, order):
    run = config(tmp_path, rollout={"prompts": 2, "samples": 2})
    scores = [[{"reward": 1.0}, {"reward": 0.0}], [{"first-number": 1.0, "reward": 0.0}] * 2]
    samples = Samples(
        prompts=[Prompt(id=str(i), text="?") for i in range(2)],
        prompt_ids=[[5], [6]],
        completions=[Completion(p, s, (7,), (-1.0,), "stop", 0) for p in range(2) for s in range(2)],
        texts=[""] * 4,
        scores=[score for i in order for score in scores[i]],
        rewards=torch.tensor([1.0, 0.0, 0.0, 0.0]),
    )
    _, metrics = collect.to_batch(run, samples)
    assert (metrics["reward/reward"], metrics["reward/first-number"]) == (0.25, 1.0)
