"""EmbeddedEngine: the rollout policy in this process.

What a seed promises: sample j of a prompt draws the same random numbers whatever shares its
batch (schedulers "batch" and "graph"). Its tokens are then the same as long as the arithmetic is: a
batch-scoped residual chooses channels over the whole batch, and kernels may round differently at
another batch size, so with quantized activations a completion can still depend on its company.
Under "continuous" a seed fixes the whole call only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbitrl.formats import QuantizedTensor
from lowbitrl.quant import Plan, attachment, real_tokens
from lowbitrl.quant.linear import RolloutLinear
from lowbitrl.rollout.embedded.batch import Decoded, decode, pad_left
from lowbitrl.rollout.embedded.continuous import decode_continuous
from lowbitrl.rollout.embedded.graph import GraphDecoder, why_unavailable
from lowbitrl.rollout.embedded.sampler import uniforms
from lowbitrl.rollout.types import Completion, Sampling
from lowbitrl.sync.manifest import Entry, Manifest, entries_of

Scheduler = Literal["auto", "batch", "graph", "continuous"]
PARTS = ("qdata", "scale", "global_scale")
AMAX = ".input_amax"
RAGGED = 0.5  # share of padding above which "auto" pages instead


class EmbeddedEngine:
    """Samples from a model prepared with side="rollout".

    Args:
        model: the prepared model.
        scheduler: "batch" decodes whole batches with a shared prompt cache; "graph" does so by a
            CUDA graph a token; "continuous" is transformers' paged continuous batching; "auto"
            takes "continuous" when more than half of a padded batch would be padding, else "graph"
            on a GPU where the model allows it, else "batch".
        max_batch: most rows decoded at once by "batch" and "graph"; bounds the cache.
        record_routing: hand out the experts that each token of a completion took. "auto" then
            means "batch": the others do not say which token is whose.

    Raises:
        ValueError: the model wears no plan or the learner's; routing is to be recorded of a dense
            model, or under another scheduler than "batch"; "graph" for a model that cannot.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        scheduler: Scheduler = "auto",
        max_batch: int = 256,
        record_routing: bool = False,
    ) -> None:
        attached = attachment(model)
        if attached.side != "rollout":
            raise ValueError("the engine needs a model prepared with side='rollout', not the learner's")
        if max_batch < 1:
            raise ValueError(f"max_batch={max_batch} decodes nothing; give at least 1")
        if record_routing and scheduler not in ("auto", "batch"):
            raise ValueError(
                f"routing is recorded by scheduler='batch', not by {scheduler!r} ('continuous' mixes requests, 'graph' "
                "runs no Python a token); set scheduler='batch' or record_routing=False"
            )
        if scheduler == "graph" and (reason := why_unavailable(model)):
            raise ValueError(f"scheduler='graph' cannot serve this model: {reason}; use 'batch'")
        if record_routing and not attached.routing.names:
            raise ValueError("record_routing=True needs a mixture of experts; this model has no routers")
        self.model = model
        self.record_routing = record_routing
        self.plan: Plan = attached.plan
        self.scheduler: Scheduler = scheduler
        self.max_batch = max_batch
        self.version = -1
        self._torn = False
        self._graphs = GraphDecoder(model)
        self._expected = {name: tuple(p.shape) for name, p in model.named_parameters()}

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """Sample n completions of each prompt, ordered by prompt, then sample.

        Args:
            prompts: token ids.
            seeds: one a prompt; by default the prompt's index.

        Raises:
            ValueError: an empty prompt, n < 1, a seed count that does not match, or a prompt that
                leaves no room within the model's positions.
            RuntimeError: the logits of every row were broken.
        """
        seeds = list(range(len(prompts))) if seeds is None else list(seeds)
        self._check(prompts, n, sampling, seeds)
        if not prompts:
            return []
        chosen = self._choose(prompts)
        if chosen == "continuous":
            digest = hashlib.sha256(repr(seeds).encode()).digest()
            seed = int.from_bytes(digest[:8], "big") >> 1
            rows = decode_continuous(self.model, prompts, n, seed, sampling, self._stop(sampling))
        else:
            rows = self._decode_batches(prompts, n, sampling, seeds, chosen == "graph")
        if all(row.broken for row in rows):
            raise RuntimeError(
                f"the logits of all {len(rows)} rows are not finite: the weights of version {self.version} are broken"
            )
        return [self._completion(i // n, i % n, row) for i, row in enumerate(rows)]

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[Tensor]:
        """Log-probability of each token after the first, (len - 1,) fp32, by a prefill pass."""
        ids, mask = pad_left(sequences, self.model.device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad(), real_tokens(self.model, mask):
            hidden = self.model(input_ids=ids, attention_mask=mask.long(), position_ids=positions).logits
        scored = []
        for row, sequence in enumerate(sequences):
            logits = hidden[row, -len(sequence) : -1].float() / (temperature or 1.0)
            scored.append(logits.log_softmax(-1).gather(-1, ids[row, -len(sequence) + 1 :, None]).squeeze(-1))
        return scored

    def update(self, stream: Iterable[tuple[str, Tensor]], manifest: Manifest) -> None:
        """Serve a new version: every tensor is checked before the first one is adopted.

        Bytes are adopted by reference, decoded values in place. No cache of the old version survives:
        key/value caches live inside one `generate` call.

        Raises:
            ValueError: another plan's version, or a stream that is not exactly the manifest's;
                the engine then still serves its old version.
        """
        self._check_plan(manifest.version, manifest.plan_digest)
        staged = dict(stream)
        manifest.verify(staged)
        scales = list(attachment(self.model).scales)
        for adopt, value in list(self._match(staged, list(self._expected), scales)):
            adopt(value)
        self.version, self._torn = manifest.version, False

    def receive(
        self, pieces: Iterable[dict[str, Tensor]], version: int, plan_digest: str
    ) -> tuple[Manifest, float]:
        """Serve a version that comes a fused group or a parameter at a time, each adopted as it comes.

        Nothing is held of it but the piece at hand. A stream that breaks off leaves no version to serve:
        `generate` refuses until one has come whole.

        Args:
            pieces: tensors by name, as `sync.publisher.pieces` makes them.

        Returns:
            What came, and the share of the quantized codes that are others than before.

        Raises:
            ValueError: another plan's version, a piece that does not fit, or one that never came.
        """
        self._check_plan(version, plan_digest)
        self._torn = True
        entries: dict[str, Entry] = {}
        codes = _Codes(self.encoded())
        for piece in pieces:
            codes.compare(piece)
            scales = [n.removesuffix(AMAX) for n in piece if n.endswith(AMAX)]
            names = [self._arrives[n] for n in piece if n in self._arrives]
            for adopt, value in self._match(piece, names, scales):
                adopt(value)
            entries |= entries_of(piece)
        arriving = [*self._arrives, *(f"{n}{AMAX}" for n in attachment(self.model).scales)]
        if lacking := [name for name in arriving if name not in entries]:
            raise ValueError(f"version {version} is incomplete: {lacking[0]} never arrived; publish it again")
        self.version, self._torn = version, False
        return Manifest(version, plan_digest, entries), codes.changed()

    def _check_plan(self, version: int, digest: str) -> None:
        if digest != self.plan.digest:
            raise ValueError(
                f"version {version} was published under plan {digest}, the engine wears "
                f"{self.plan.digest}; prepare both sides from one recipe (Plan.diff shows where they part)"
            )

    @cached_property
    def _arrives(self) -> dict[str, str]:
        """Every parameter by the name under which what replaces it arrives."""
        layers = {name: self.plan.by_parameter.get(name) for name in self._expected}
        return {f"{r.name}.qdata" if r is not None and r.weight else n: n for n, r in layers.items()}

    def _match(
        self, staged: dict[str, Tensor], names: Sequence[str], scales: Sequence[str]
    ) -> Iterator[tuple[Callable[[Any], None], Any]]:
        """Pair what replaces each of the parameters and static scales with who takes it, raising where none came."""
        parameters = dict(self.model.named_parameters())
        holders: dict[str, Any] = {**dict(self.model.named_modules()), **attachment(self.model).stacks}
        for name in names:
            shape = self._expected[name]
            layer = self.plan.by_parameter.get(name)
            if layer is not None and layer.weight:
                named = {part: f"{layer.name}.{part}" for part in PARTS}
                parts = {p: staged[n].to(self.model.device) for p, n in named.items() if n in staged}
                if "qdata" not in parts:
                    raise ValueError(f"{layer.name} is planned as {layer.weight}, but no bytes came for it")
                encoded = QuantizedTensor.from_tensors(parts, layer.shape, layer.weight)
                yield holders[layer.name].adopt, encoded
            elif name not in staged or tuple(staged[name].shape) != shape:
                found = tuple(staged[name].shape) if name in staged else "absent"
                raise ValueError(f"{name} must come as {shape}, found {found}")
            else:
                yield partial(_replace, parameters[name]), staged[name].to(self.model.device)
        for name in scales:
            if f"{name}{AMAX}" not in staged:
                raise ValueError(f"{name} is planned with a static scale of its input, but none came for it")
            scale = attachment(self.model).scales[name]
            yield partial(setattr, scale, "amax"), staged[f"{name}{AMAX}"].to(self.model.device)

    def served(self) -> dict[str, Tensor]:
        """Everything it serves by the name it was published under: bytes, plain parameters, static maxima."""
        parts = {f"{n}.{part}": t for n, q in self.encoded().items() for part, t in q.tensors().items()}
        maxima = {f"{name}{AMAX}": scale.amax for name, scale in attachment(self.model).scales.items()}
        return parts | dict(self.model.named_parameters()) | maxima

    def encoded(self) -> dict[str, QuantizedTensor]:
        """The bytes served now, by the plan's names."""
        modules = self.model.named_modules()
        held = {n: m.encoded for n, m in modules if isinstance(m, RolloutLinear) and m.encoded is not None}
        for stack in attachment(self.model).stacks.values():
            held |= stack.encoded()
        return held

    def _choose(self, prompts: Sequence[Sequence[int]]) -> Scheduler:
        if self.scheduler != "auto" or self.record_routing:
            return "batch" if self.record_routing else self.scheduler
        lengths = [len(p) for p in prompts]
        padding = 1 - sum(lengths) / (max(lengths) * len(lengths))
        if padding > RAGGED:
            return "continuous"
        return "graph" if self.model.device.type == "cuda" and not why_unavailable(self.model) else "batch"

    def _decode_batches(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: list[int], graph: bool
    ) -> list[Decoded]:
        rows: dict[tuple[int, int], Decoded] = {}
        for chunk, first, count in _chunks([len(p) for p in prompts], n, self.max_batch):
            streams = [
                uniforms(seeds[p], first + j, sampling.max_tokens) for p in chunk for j in range(count)
            ]
            chosen = [prompts[p] for p in chunk]
            work = (chosen, count, torch.stack(streams), sampling, self._stop(sampling))
            with torch.no_grad():
                decoded = (
                    self._graphs.decode(*work) if graph else decode(self.model, *work, self.record_routing)
                )
            rows.update(zip(((p, first + j) for p in chunk for j in range(count)), decoded, strict=True))
        return [rows[p, j] for p in range(len(prompts)) for j in range(n)]

    def _stop(self, sampling: Sampling) -> tuple[int, ...]:
        if sampling.stop_token_ids:
            return sampling.stop_token_ids
        return stop_tokens(self.model)

    def _completion(self, prompt: int, sample: int, row: Decoded) -> Completion:
        reason = "nonfinite" if row.broken else "stop" if row.stopped else "length"
        routes = torch.cat(row.routes) if row.routes else None
        return Completion(
            prompt, sample, tuple(row.tokens), tuple(row.logprobs), reason, self.version, routes
        )

    def _check(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: list[int]) -> None:
        if self._torn:
            raise ValueError("an update broke off, so no whole version is served; publish one again")
        if n < 1:
            raise ValueError(f"n={n} samples nothing; give at least 1")
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one a prompt")
        limit = getattr(self.model.config, "max_position_embeddings", None)
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {index} is empty; give at least one token")
            if limit is not None and len(prompt) + sampling.max_tokens > limit:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens; with max_tokens={sampling.max_tokens} it passes "
                    f"the model's {limit} positions: shorten it or lower max_tokens"
                )


def stop_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """What ends a completion of this model. Raises ValueError if it names nothing."""
    own = model.generation_config.eos_token_id if model.generation_config else None
    own = model.config.eos_token_id if own is None else own
    if own is None:
        raise ValueError("the model names no end-of-sequence token; set Sampling.stop_token_ids")
    return (own,) if isinstance(own, int) else tuple(own)


class _Codes:
    """Counts the quantized codes that a version changes; what is compared is let go."""

    def __init__(self, held: dict[str, QuantizedTensor]) -> None:
        self._held = held
        self._changed: list[Tensor] = []
        self._total = 0

    def compare(self, piece: dict[str, Tensor]) -> None:
        for name, new in piece.items():
            old = self._held.pop(name.removesuffix(".qdata"), None)
            if old is not None and name.endswith(".qdata"):
                self._changed.append((old.qdata.to(new.device) != new).sum())
                self._total += new.numel()

    def changed(self) -> float:
        return int(torch.stack(self._changed).sum()) / self._total if self._changed else 0.0


def _replace(parameter: torch.nn.Parameter, value: Tensor) -> None:
    parameter.data.copy_(value)  # in place: CUDA graphs hold its address


def _chunks(lengths: list[int], n: int, max_batch: int) -> Iterator[tuple[list[int], int, int]]:
    """(prompt indices, first sample, samples a prompt) of batches of at most `max_batch` rows.

    Prompts are taken by length, so that a batch holds little padding.
    """
    count = min(n, max_batch)
    per_batch = max(1, max_batch // count)
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    for first in range(0, n, count):
        for start in range(0, len(order), per_batch):
            yield order[start : start + per_batch], first, min(count, n - first)


def prompt_seed(*parts: object) -> int:
    """A seed below 2^63 out of anything printable: run seed, step, prompt id."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1
