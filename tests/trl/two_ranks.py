"""One rank of a run in two processes; writes what the ranks must agree and differ on."""

import hashlib
import json
import sys
from pathlib import Path

from lowbitrl.quant import Recipe
from tests.conftest import tiny_llama
from tests.trl.test_trl_trainer import trainer

(folder,) = sys.argv[1:]
made = trainer(
    folder,
    Recipe(rollout="nvfp4-w4a16", learner="weights"),
    model=tiny_llama(),
    per_device_train_batch_size=4,
)
sampled = []
generate = made.rollouts.generate


def keeping(*args):
    completions, metrics = generate(*args)
    sampled.extend(c.token_ids for c in completions)
    return completions, metrics


made.rollouts.generate = keeping
made.train()
weights = b"".join(p.detach().float().numpy().tobytes() for p in made.model.parameters())
digest = hashlib.sha256(weights).hexdigest()[:16]
tokens = hashlib.sha256(repr(sampled).encode()).hexdigest()[:16]
gap = max(row["mismatch/abs_mean"] for row in made.state.log_history if "mismatch/abs_mean" in row)
out = Path(folder) / f"rank{made.accelerator.process_index}.json"
out.write_text(json.dumps({"weights": digest, "tokens": tokens, "gap": gap}))
