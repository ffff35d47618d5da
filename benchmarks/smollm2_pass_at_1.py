"""pass@1 of the demo model at temperature 1 on a prefilled sum: does the prompt wording leave signal?

    OMP_NUM_THREADS=2 python benchmarks/smollm2_pass_at_1.py
    OMP_NUM_THREADS=2 python benchmarks/smollm2_pass_at_1.py --no-prefill --scorer last-number --max-new-tokens 40

Samples with transformers' `generate` in BF16, 8 samples a prompt, and prints one JSON object: the evaluation
with standard errors clustered by prompt, the command's settings, versions, and a few completions.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from lowbitrl.evaluation import evaluate
from lowbitrl.models import load_model
from lowbitrl.tasks import TaskConfig, make_task


@dataclass(frozen=True)
class Sampled:
    """What `evaluate` reads of a completion."""

    prompt_index: int
    token_ids: list[int]
    finish_reason: str


class GenerateEngine:
    """`model.generate` with left padding, as the engine that `evaluate` asks."""

    def __init__(self, model: Any, tokenizer: Any, batch: int) -> None:
        self.model, self.tokenizer, self.batch = model, tokenizer, batch
        self.texts: list[str] = []

    def generate(self, prompts: Any, n: int, sampling: dict[str, Any], seeds: Any = None) -> list[Sampled]:
        rows = [(index, ids) for index, ids in enumerate(prompts) for _ in range(n)]
        batches = [rows[start : start + self.batch] for start in range(0, len(rows), self.batch)]
        return [sampled for batch in batches for sampled in self._sample(batch, sampling)]

    @torch.inference_mode()
    def _sample(self, rows: list[tuple[int, list[int]]], sampling: dict[str, Any]) -> list[Sampled]:
        inputs = self.tokenizer.pad(
            {"input_ids": [ids for _, ids in rows]}, return_tensors="pt", padding_side="left"
        )
        output = self.model.generate(**inputs, do_sample=True, top_k=0, top_p=1.0, **sampling)
        replies = output[:, inputs.input_ids.shape[1] :].tolist()
        self.texts += self.tokenizer.batch_decode(replies, skip_special_tokens=True)
        return [self._cut(index, reply) for (index, _), reply in zip(rows, replies, strict=True)]

    def _cut(self, index: int, reply: list[int]) -> Sampled:
        end = self.tokenizer.eos_token_id
        if end in reply:
            return Sampled(index, reply[: reply.index(end) + 1], "stop")
        return Sampled(index, reply, "length")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="chain_sum")
    parser.add_argument(
        "--options", type=json.loads, default={"min_terms": 2, "max_terms": 2, "max_digits": 2}
    )
    parser.add_argument("--prefill", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--scorer", default="first-number")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    model, tokenizer = load_model("demo", torch.bfloat16)
    task = make_task(
        TaskConfig(
            name=args.task, options=args.options, prefill=args.prefill, scorer=args.scorer, seed=args.seed
        )
    )
    engine = GenerateEngine(model, tokenizer, args.batch)
    sampling = {"max_new_tokens": args.max_new_tokens, "temperature": 1.0}
    result = evaluate(engine, task, tokenizer, split="train", count=args.prompts, n=args.n, sampling=sampling)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    report = {"settings": vars(args), "evaluation": result.to_dict(), "versions": versions}
    print(json.dumps(report | {"completions": engine.texts[:: args.n][:8]}, indent=2))


if __name__ == "__main__":
    main()
