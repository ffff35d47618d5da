"""A version's manifest as the JSON that travels to vLLM's workers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lowbitrl.sync.manifest import Entry, Manifest


def manifest_data(manifest: Manifest) -> dict[str, Any]:
    """A manifest as JSON data."""
    return asdict(manifest) | {"entries": {name: asdict(entry) for name, entry in manifest.entries.items()}}


def manifest_of(data: dict[str, Any]) -> Manifest:
    """Inverse of `manifest_data`."""
    entries = {
        name: Entry(tuple(entry["shape"]), entry["dtype"], entry["checksum"])
        for name, entry in data["entries"].items()
    }
    return Manifest(data["version"], data["plan_digest"], entries)
