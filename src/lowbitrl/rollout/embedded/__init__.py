"""The engine inside the process: transformers models wearing our rollout modules."""

from lowbitrl.rollout.embedded.engine import EmbeddedEngine, prompt_seed, stop_tokens

__all__ = ["EmbeddedEngine", "prompt_seed", "stop_tokens"]
