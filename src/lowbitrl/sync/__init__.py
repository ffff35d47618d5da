"""Weights on their way from the learner to an engine: what is shipped, and proof that it arrived."""
