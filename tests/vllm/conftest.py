"""What every test with a real vLLM shares."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Usage statistics leave the machine otherwise.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
