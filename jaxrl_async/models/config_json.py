"""What roles without JAX read of a config.json, too."""

from collections.abc import Mapping
from typing import Any


def num_experts(hf: Mapping[str, Any]) -> int:
    """Experts of each layer: by Qwen3-MoE's name in transformers 4, and by Mixtral's and that of 5; 0 without any."""
    return hf.get("num_experts") or hf.get("num_local_experts") or 0
