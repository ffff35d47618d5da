"""How a task calls a reward function: in this process, or contained in a pool of others."""

from __future__ import annotations

from collections.abc import Sequence

from lowbitrl.tasks.config import RewardsConfig
from lowbitrl.tasks.pool import RewardPool, Work
from lowbitrl.tasks.rewards import Failure, RewardError, call_reward, import_reward
from lowbitrl.watch import beat


class Judge:
    """Calls `package.module:function` on completions and their prompts.

    Args:
        check: the empty completion and a prompt; the function must give it a reward.
        contained: in processes of their own; they start with the first call of either method.
    """

    def __init__(self, spec: str, config: RewardsConfig, check: Work, contained: bool) -> None:
        self.spec, self.config, self.check = spec, config, check
        self.contained = contained
        self._function = None if contained else import_reward(spec)
        self._pool: RewardPool | None = None

    def prove(self) -> None:
        """Call the check. Raises what `import_reward` raises, and RewardError with what goes wrong."""
        if self._function is not None:
            call_reward(self.spec, self._function, *self.check)
        elif self._pool is None:
            self._pool = RewardPool(self.spec, self.config.limits(), self.check, self.config.workers)

    def __call__(self, work: Sequence[Work]) -> list[float | Failure]:
        """A reward or a failure for each."""
        if not work:
            return []
        if self._function is not None:
            return [self._here(*one) for one in work]
        self.prove()
        assert self._pool is not None
        return self._pool.score(work)

    def close(self) -> None:
        """End the processes; a later call starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _here(self, completion: str, prompt: dict) -> float | Failure:
        assert self._function is not None
        beat()
        try:
            return call_reward(self.spec, self._function, completion, prompt)
        except RewardError as error:
            return error.failure
