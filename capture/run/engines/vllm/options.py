"""Arguments of `vllm.LLM` that a user may give, and what they mean for a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Those that the run itself sets.
TAKEN = frozenset(
    {
        "dtype",
        "enable_prefix_caching",
        "kv_transfer_config",
        "max_model_len",
        "model",
        "pipeline_parallel_size",
        "revision",
        "skip_tokenizer_init",
        "speculative_config",
        "tokenizer",
        "trust_remote_code",
    }
)
# They say where and with how much memory vLLM computes, so a run may be taken up again with others.
RESOURCES = frozenset(
    {
        "cpu_offload_gb",
        "distributed_executor_backend",
        "enforce_eager",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_batched_tokens",
        "max_num_seqs",
        "tensor_parallel_size",
    }
)


def engine_identity(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that may change values, for the identity of a run."""
    return {name: value for name, value in sorted(options.items()) if name not in RESOURCES}
