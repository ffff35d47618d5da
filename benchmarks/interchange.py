"""What other readers make of the checkpoints that `lowbitrl quantize` writes: the tables of docs/interchange.md.

    python benchmarks/interchange.py write FOLDER     every recipe on the demo model, and its decoded BF16 twin;
                                                      compares with transformers through compressed-tensors
    python benchmarks/interchange.py vllm FOLDER      with a vLLM in another environment: log-probabilities of one
                                                      text under each checkpoint and its twin, or why it will not load

`vllm` imports nothing of this package, so it runs where only vLLM is installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

TEXT = (
    "The capital of France is Paris, and the river that crosses it is the Seine. Seventeen plus twenty-five is "
    "forty-two."
)
ROLLOUTS = ("nvfp4-w4a16", "fp8", "int8", "int4", "int4-fp8", "mxfp4", "mxfp8")


def write(folder: Path) -> None:
    """One line a recipe: size, seconds, weights that transformers decodes otherwise, logits apart."""
    import torch
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    from lowbitrl.checkpoints import load_quantized, quantize_checkpoint
    from lowbitrl.models import load_model
    from lowbitrl.quant import Recipe

    torch.set_grad_enabled(False)
    for rollout in ROLLOUTS:
        out, start = folder / rollout, time.perf_counter()
        quantize_checkpoint("demo", Recipe(rollout=rollout), out)
        seconds = time.perf_counter() - start
        size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        ours, tokenizer = load_model("demo")
        ours.load_state_dict(load_quantized(out).state_dict(), strict=False)
        ours.save_pretrained(folder / f"{rollout}.bf16")
        tokenizer.save_pretrained(folder / f"{rollout}.bf16")
        dequantize = CompressedTensorsConfig(dequantize=True)
        theirs = AutoModelForCausalLM.from_pretrained(
            out, dtype=torch.bfloat16, quantization_config=dequantize
        ).eval()
        differ = sum(int((p != theirs.get_parameter(n)).sum()) for n, p in ours.named_parameters())
        ids = tokenizer(TEXT, return_tensors="pt").input_ids
        apart = float((ours(ids).logits - theirs(ids).logits).abs().max())
        print(
            f"{rollout:12} {size / 1e6:6.1f} MB {seconds:5.1f} s  {differ:7} weights differ, logits {apart:.4f}"
        )
    quantize_checkpoint("demo", Recipe(rollout="nvfp4-w4a16"), folder / "nvfp4-w4a16.modelopt", "modelopt")


def score(folder: Path) -> None:
    """Print the log-probabilities of TEXT under one checkpoint, served by vLLM."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=512, enable_prefix_caching=False
    )
    result = llm.generate([TEXT], SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0))[0]
    print("SCORES", *(next(iter(token.values())).logprob for token in result.prompt_logprobs[1:]))


def vllm(folder: Path) -> None:
    """One line a checkpoint: mean and largest difference to its decoded BF16 twin, both served by vLLM."""
    for out in sorted(path for path in folder.iterdir() if path.is_dir() and path.suffix != ".bf16"):
        theirs, error = _scores(out)
        twin, other = _scores(out.with_suffix(".bf16")) if theirs else ([], "")
        apart = [abs(a - b) for a, b in zip(theirs, twin, strict=False)]
        means = f"mean {sum(apart) / len(apart):.3f} max {max(apart):.3f}" if apart else error or other
        print(f"{out.name:22}", means, flush=True)


def _scores(folder: Path) -> tuple[list[float], str]:
    # A process each: vLLM keeps global state, and a format that it refuses takes the process along.
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [sys.executable, __file__, "score", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    lines = [line for line in run.stdout.splitlines() if line.startswith("SCORES")]
    errors = [line for line in run.stderr.splitlines() if "Error:" in line]
    if lines:
        return [float(x) for x in lines[-1].split()[1:]], ""
    return [], (errors or ["no output"])[-1][:160]


if __name__ == "__main__":
    {"write": write, "vllm": vllm, "score": score}[sys.argv[1]](Path(sys.argv[2]))
