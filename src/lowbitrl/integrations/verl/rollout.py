"""The embedded engine as a rollout of verl's (`rollout.name=lowbitrl`): any device, no vLLM.

A replica is one Ray actor that wears the plan's rollout side. verl asks for one completion at a time; what
is asked while a batch is being sampled makes up the next one, by equal sampling parameters.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
import torch
from safetensors.torch import load, save
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name, get_resource_name, get_visible_devices_keyword
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from lowbitrl.integrations.verl.settings import RolloutSettings
from lowbitrl.integrations.verl.stream import Arrivals
from lowbitrl.quant import prepare
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.rollout.embedded.engine import prompt_seed
from lowbitrl.rollout.types import Sampling
from lowbitrl.rollout.vllm.sending import buckets

VENDOR = "lowbitrl"
BUCKET_BYTES = 1 << 28


def register() -> None:
    """Make `rollout.name=lowbitrl` mean this rollout; idempotent."""
    RolloutReplicaRegistry.register(VENDOR, lambda: LowbitReplica)
    _ROLLOUT_REGISTRY[VENDOR, "async"] = f"{__name__}.ServerAdapter"


class Server:
    """One replica's engine, and the requests that wait for it."""

    def __init__(self, config: Any, path: str, replica: int) -> None:
        from lowbitrl.models import load_model

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or torch.get_num_threads())
        self.config, self.replica, self.steps = config, replica, None
        settings = RolloutSettings.model_validate(dict(config.engine_kwargs[VENDOR]))
        model, _ = load_model(path, config.dtype, get_device_name())
        options = settings.model_dump(include={"keep_decoded_experts", "kernels"})
        prepare(model, settings.load(), "rollout", **options)
        self.engine = EmbeddedEngine(model, settings.scheduler, settings.max_batch)
        self.arrivals = Arrivals()
        self.waiting: list[tuple[list[int], Sampling, asyncio.Future[TokenOutput]]] = []
        self.asked = 0
        self.busy = asyncio.Lock()

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **_: Any
    ) -> TokenOutput:
        """One completion with its log-probabilities.

        Raises:
            ValueError: truncated sampling, or no version yet.
        """
        done: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        self.waiting.append((list(prompt_ids), self._sampling(sampling_params, len(prompt_ids)), done))
        # One turn of the loop: requests that arrived together are answered together.
        await asyncio.sleep(0.02)
        async with self.busy:
            if self.waiting:
                await self._answer()
        return await done

    async def _answer(self) -> None:
        sampling = self.waiting[0][1]
        batch = [entry for entry in self.waiting if entry[1] == sampling]
        self.waiting = [entry for entry in self.waiting if entry[1] != sampling]
        seeds = [
            prompt_seed(self.config.seed, self.replica, self.steps, self.asked + i) for i in range(len(batch))
        ]
        self.asked += len(batch)
        prompts = [prompt for prompt, _, _ in batch]
        try:
            completions = await asyncio.to_thread(self.engine.generate, prompts, 1, sampling, seeds)
        except Exception as error:
            for _, _, done in batch:
                done.set_exception(error)
            return
        for (_, _, done), completion in zip(batch, completions, strict=True):
            done.set_result(
                TokenOutput(
                    token_ids=list(completion.token_ids),
                    log_probs=list(completion.rollout_logprobs),
                    stop_reason="completed",
                    extra_fields={"global_steps": self.steps},
                )
            )

    def _sampling(self, asked: dict[str, Any], prompt: int) -> Sampling:
        """verl's parameters; `Sampling` refuses what truncates."""
        room = min(
            self.config.response_length, self.config.prompt_length + self.config.response_length - prompt
        )
        tokens = asked.get("max_tokens", asked.get("max_new_tokens", room))
        top_k = asked.get("top_k", -1)
        return Sampling(
            max_tokens=max(1, tokens),
            temperature=asked.get("temperature", 1.0),
            top_p=asked.get("top_p", 1.0),
            top_k=0 if top_k in (-1, None) else top_k,
        )

    async def take(self, bucket: bytes) -> None:
        """Some pairs of a version's stream, as a file of tensors."""
        self.arrivals.take(load(bucket).items())

    async def serve(self, steps: int | None) -> None:
        """Serve what arrived, whole or not at all."""
        arrivals, self.arrivals = self.arrivals, Arrivals()
        async with self.busy:
            self.engine.update(arrivals.tensors.items(), arrivals.manifest())
        self.steps, self.asked = steps, 0

    async def nothing(self, *_: Any, **__: Any) -> None:
        """Memory and caches: the engine holds none between calls."""

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = nothing


class LowbitReplica(RolloutReplica):
    """One `Server` where the learner's first rank of the replica is.

    Raises:
        ValueError: a replica over several devices.
    """

    async def launch_servers(self) -> None:
        """Start the actor."""
        if self.world_size != 1:
            raise ValueError(
                f"rollout.tensor_model_parallel_size and its like make {self.world_size} devices a replica; the "
                "embedded engine takes one: set them to 1, or use rollout.engine='vllm'"
            )
        node, device = await self.workers[0].__ray_call__.remote(_where)
        place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        # Ray would hide the GPUs from an actor that asks for none; this one shares the learner's.
        seen = dict.fromkeys(get_platform().ray_noset_envvars(), "1") | {
            get_visible_devices_keyword(): device
        }
        options = {
            "name": server_name(self.replica_rank),
            "max_concurrency": self.max_concurrency,
            "num_cpus": 0,
        }
        actor = ray.remote(Server).options(
            scheduling_strategy=place, runtime_env={"env_vars": seen}, **options
        )
        server = actor.remote(self.config, self.model_config.path, self.replica_rank)
        self.servers = [server]
        self._server_handle, self._server_address = server, server_name(self.replica_rank)


class ServerAdapter(BaseRollout):
    """The learner's side of a replica: hands the published stream to its server, in buckets."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing is held that could be."""

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **_: Any
    ) -> None:
        """Send a version and have it served; ValueError for a stream that is not one."""
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format={wire_format!r}: published bytes come as named tensors")
        server = ray.get_actor(server_name(self.replica_rank))
        for bucket in buckets(weights, BUCKET_BYTES):
            # Not pickled: torch's pickles of FP8 tensors do not load in another process.
            await server.take.remote(save({name: t.cpu().contiguous().clone() for name, t in bucket.items()}))
        await server.serve.remote(global_steps)


def _where(_: Any) -> tuple[str, str]:
    """Node and device of the worker that runs this."""
    context = ray.get_runtime_context()
    return context.get_node_id(), str(context.get_accelerator_ids()[get_resource_name()][0])


def server_name(replica: int) -> str:
    """Of a replica's actor."""
    return f"lowbitrl_server_{replica}"
