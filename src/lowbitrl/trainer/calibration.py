"""The first static scales of a model: what its sites see of some sequences before anything is quantized by them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from lowbitrl.distributed.sharding import device_of, whole_pass
from lowbitrl.quant import attachment, calibrate, real_tokens
from lowbitrl.trainer.batch import ModelInput, arrange, micro_batches


@torch.no_grad()
def calibrate_on(model: PreTrainedModel, sequences: Sequence[Sequence[int]], micro_batch_tokens: int) -> None:
    """Find the static scales of a prepared model from token ids; nothing where it has no static site.

    Raises:
        RuntimeError: a site that no sequence reached.
        ValueError: NaN or Inf at a site, no sequences.
    """
    if attachment(model).scales:
        if not sequences:
            raise ValueError("activation_scale='static' needs sequences to find its scales on; give prompts")
        calibrate(model, lambda: _passes(model, sequences, micro_batch_tokens))


def _passes(model: PreTrainedModel, sequences: Sequence[Sequence[int]], micro_batch_tokens: int) -> None:
    for rows in micro_batches([len(s) for s in sequences], micro_batch_tokens, "padded"):
        batch = arrange([list(sequences[i]) for i in rows], [[] for _ in rows], "padded", device_of(model))
        with real_tokens(model, batch.real):
            whole_pass(model, lambda batch=batch: _read(model, batch))


def _read(model: PreTrainedModel, batch: ModelInput) -> None:
    model.base_model(
        input_ids=batch.ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.positions,
        use_cache=False,
    )
