"""Speed: one op a file, every one equal to its reference, each with ``backend=``.

``<op>.py`` is the front door: what the op computes, which backends can, the torch custom op and its fake.
``<op>_triton.py`` is the Triton body and its launcher, loaded at first use: nothing here imports Triton.
"""

from .backend import choose, known_backends, register_backend, why_unavailable

__all__ = ["choose", "known_backends", "register_backend", "why_unavailable"]
