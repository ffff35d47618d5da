"""What verl imports through the entry point `verl.plugins`, in every process that imports verl.

verl only logs a plugin that fails, at a level nobody reads; `lowbitrl verl check` says what is missing, and
the learner's engine refuses to start without it. Losses are always registered, they cost little; engine and
rollout wait until the run asks for them, since their imports take seconds.
"""

from __future__ import annotations

import os

from lowbitrl.integrations.verl.losses import register

VENDOR = "lowbitrl"

register()
if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR:
    from lowbitrl.integrations.verl import engine, rollout

    engine.register()
    rollout.register()
