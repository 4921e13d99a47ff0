"""A package `vllm` that stands in for the real one: a plain forward of transformers behind vLLM's ways of asking.

It keeps hidden states in a cache of blocks, hands out blocks in no order, packs prompts into steps, and calls the connector as
vLLM does. Layers it knows as vLLM does: id k is the state after k layers, id n what enters the final norm.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

CONNECTOR = "hiddentap.capture.run.vllm.connector"
BLOCK, BLOCKS = 4, 200


class KVConnectorBase:
    def __init__(self, vllm_config: Any, role: str, kv_cache_config: Any) -> None:
        self.metadata: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self.metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self.metadata


class SupportsHMA: ...


class KVConnectorMetadata: ...


class HiddenStateCacheSpec: ...


class FullAttentionSpec: ...


KVConnectorRole = SimpleNamespace(SCHEDULER="scheduler", WORKER="worker")


@dataclass
class SamplingParams:
    max_tokens: int = 16
    temperature: float = 1.0
    detokenize: bool = True
    extra_args: dict[str, Any] | None = None


@dataclass
class Faults:
    """What goes wrong: token ids that the scheduler changes, requests it forgets, an id whose state another takes."""

    change_token: bool = False
    forget: int | None = None
    missing_id: int | None = None
    fail: str = ""
    cut: int | None = None
    opened: list[Any] = field(default_factory=list)


class LLM:
    """Opened with vLLM's arguments, which stay readable as `arguments`."""

    faults = Faults()

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.closed = False
        self.faults.opened.append(self)
        self.ids = arguments["speculative_config"]["draft_model_config"]["hf_config"][
            "eagle_aux_hidden_state_layer_ids"
        ]
        self.model = AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=getattr(torch, arguments["dtype"]))
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._shut_down))
        transfer = arguments["kv_transfer_config"]
        made = getattr(importlib.import_module(transfer["kv_connector_module_path"]), transfer["kv_connector"])
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(**transfer))
        attention = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["a", "b"])
        hidden = SimpleNamespace(kv_cache_spec=HiddenStateCacheSpec(), layer_names=["hidden"])
        caches = SimpleNamespace(kv_cache_groups=[attention, hidden])
        self.scheduler = made(config, KVConnectorRole.SCHEDULER, caches)
        self.worker = made(config, KVConnectorRole.WORKER, caches)
        self.cache = torch.full((BLOCKS, len(self.ids), BLOCK, self.model.config.hidden_size), torch.nan)
        self.cache = self.cache.to(self.model.dtype)
        self.worker.register_kv_caches({"a": torch.zeros(1), "hidden": self.cache})

    def _shut_down(self) -> None:
        self.closed = True

    def generate(self, prompts: list[dict[str, Any]], params: list[SamplingParams], use_tqdm: bool) -> None:
        if self.faults.fail:
            raise RuntimeError(self.faults.fail)
        step: list[Any] = []
        for number, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
            if number == self.faults.forget:
                continue
            request = self._request(number, list(prompt["prompt_token_ids"]), asked)
            if sum(len(r.prompt_token_ids) for r in [*step, request]) > self.arguments["max_num_batched_tokens"]:
                self._run(step)
                step = []
            step.append(request)
        self._run(step)

    def _request(self, number: int, ids: list[int], asked: SamplingParams) -> Any:
        if self.faults.change_token:
            ids[-1] = (ids[-1] + 1) % 50
        return SimpleNamespace(
            req_id=f"r{number}", prompt_token_ids=ids, sampling_params=asked, num_computed_tokens=0, block_ids=None
        )

    def _run(self, step: list[Any]) -> None:
        free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()
        scheduled = {}
        for request in step:
            S = len(request.prompt_token_ids)
            blocks = [free.pop() for _ in range(-(-(S + 1) // BLOCK))]
            request.block_ids = ([7] * len(blocks), blocks)
            scheduled[request.req_id] = S if self.faults.cut is None else min(S, self.faults.cut)
            self._fill(request.prompt_token_ids, blocks)
        metadata = self.scheduler.build_connector_meta(
            SimpleNamespace(scheduled_new_reqs=step, num_scheduled_tokens=scheduled)
        )
        self.worker.bind_connector_metadata(metadata)
        self.worker.wait_for_save()

    def _fill(self, ids: list[int], blocks: list[int]) -> None:
        states = self._states(ids)
        for t in range(len(ids)):
            self.cache[blocks[t // BLOCK], :, t % BLOCK] = states[t]

    @torch.no_grad()
    def _states(self, ids: list[int]) -> torch.Tensor:
        """(S, ids, H)."""
        entered: list[torch.Tensor] = []
        hook = self.model.model.norm.register_forward_pre_hook(lambda _m, args: entered.append(args[0]))
        hs = self.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        hook.remove()
        n = self.model.config.num_hidden_layers
        found = {k: (entered[0] if k == n else hs[k])[0] for k in self.ids}
        if self.faults.missing_id is not None:
            found[self.faults.missing_id] = found[self.ids[0]]
        return torch.stack([found[k] for k in self.ids], 1)


def install(monkeypatch: pytest.MonkeyPatch, **faults: Any) -> Faults:
    """Make `import vllm` give this one until the test ends; returns what it notes."""
    told = Faults(**faults)
    monkeypatch.setattr(LLM, "faults", told)
    base = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    contents = {
        "vllm": {"LLM": LLM, "SamplingParams": SamplingParams, "__version__": "0.0-fake"},
        "vllm.platforms": {
            "current_platform": SimpleNamespace(is_cpu=lambda: True, get_device_name=lambda: "a fake device")
        },
        base: {
            "KVConnectorBase_V1": KVConnectorBase,
            "KVConnectorMetadata": KVConnectorMetadata,
            "KVConnectorRole": KVConnectorRole,
            "SupportsHMA": SupportsHMA,
        },
        "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
        "vllm.v1.kv_cache_interface": {"HiddenStateCacheSpec": HiddenStateCacheSpec},
    }
    parts = base.split(".")
    parents = [".".join(parts[:i]) for i in range(1, len(parts))] + ["vllm.v1"]
    for name in [*parents, *contents]:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        monkeypatch.setenv(name, "as a user set it")
    # Made anew on the classes of this vllm, and gone with them.
    monkeypatch.setitem(sys.modules, CONNECTOR, None)
    monkeypatch.delitem(sys.modules, CONNECTOR)
    return told
