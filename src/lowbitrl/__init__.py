"""lowbitrl: low-bit rollouts for LLM reinforcement learning that train as well as BF16."""

__version__ = "0.1.0"
