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

CONNECTOR = "hiddentap.capture.run.engines.vllm.connector"
KEEPER = "cache_only_layers.4"
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


KVConnectorRole = SimpleNamespace(SCHEDULER="scheduler", WORKER="worker")


@dataclass
class SamplingParams:
    max_tokens: int = 16
    temperature: float = 1.0
    detokenize: bool = True
    extra_args: dict[str, Any] | None = None
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False


@dataclass
class Faults:
    """What goes wrong: token ids that the scheduler changes, requests it forgets, an id whose state another takes."""

    change_token: bool = False
    forget: int | None = None
    missing_id: int | None = None
    fail: str = ""
    cut: int | None = None
    opened: list[Any] = field(default_factory=list)


@dataclass
class Request:
    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    def as_new(self) -> Any:
        return SimpleNamespace(
            req_id=self.req_id, prompt_token_ids=self.prompt_token_ids, sampling_params=self.sampling_params,
            num_computed_tokens=0, block_ids=([7] * len(self.blocks), list(self.blocks)),
        )  # fmt: skip


class LLM:
    """Opened with vLLM's arguments, which stay readable as `arguments`."""

    faults = Faults()

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.closed = False
        self.faults.opened.append(self)
        if "speculative_config" not in arguments:
            self._open_for_answers()
            return
        self.ids = arguments["speculative_config"]["draft_model_config"]["hf_config"][
            "eagle_aux_hidden_state_layer_ids"
        ]
        self.model = AutoModelForCausalLM.from_pretrained(arguments["model"], dtype=getattr(torch, arguments["dtype"]))
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self._shut_down))
        transfer = arguments["kv_transfer_config"]
        made = getattr(importlib.import_module(transfer["kv_connector_module_path"]), transfer["kv_connector"])
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(**transfer))
        sliding = SimpleNamespace(layer_names=["model.layers.0.attn"])
        full = SimpleNamespace(layer_names=["model.layers.1.attn", KEEPER])
        caches = SimpleNamespace(kv_cache_groups=[sliding, full])
        self.scheduler = made(config, KVConnectorRole.SCHEDULER, caches)
        self.worker = made(config, KVConnectorRole.WORKER, caches)
        self.cache = torch.full((BLOCKS, len(self.ids), BLOCK, self.model.config.hidden_size), torch.nan)
        self.cache = self.cache.to(self.model.dtype)
        self.worker.register_kv_caches({"model.layers.0.attn": torch.zeros(1), KEEPER: self.cache})

    def _shut_down(self) -> None:
        self.closed = True

    def _open_for_answers(self) -> None:
        self.ids = None
        self.model = AutoModelForCausalLM.from_pretrained(self.arguments["model"])
        self.llm_engine = SimpleNamespace(
            engine_core=SimpleNamespace(shutdown=self._shut_down),
            model_config=SimpleNamespace(max_model_len=self.model.config.max_position_embeddings),
        )

    @torch.no_grad()
    def _answer(self, prompt: list[int], asked: SamplingParams) -> Any:
        """As the real one: the stop token is among the tokens, its id is the stop reason."""
        generator, tokens = torch.Generator().manual_seed(asked.seed or 0), list[int]()
        while len(tokens) < asked.max_tokens:
            logits = self.model(torch.tensor([prompt + tokens])).logits[0, -1]
            if asked.temperature == 0:
                tokens.append(int(logits.argmax()))
            else:
                weights = (logits / asked.temperature).softmax(-1)
                tokens.append(int(torch.multinomial(weights, 1, generator=generator)))
            if tokens[-1] in asked.stop_token_ids:
                return SimpleNamespace(token_ids=tokens, finish_reason="stop", stop_reason=tokens[-1])
        return SimpleNamespace(token_ids=tokens, finish_reason="length", stop_reason=None)

    def generate(self, prompts: list[dict[str, Any]], params: list[SamplingParams], use_tqdm: bool) -> Any:
        """Answers; or steps of at most `max_num_batched_tokens` tokens: a prompt that does not fit goes on in the next one."""
        if self.faults.fail:
            raise RuntimeError(self.faults.fail)
        return self._compute(prompts, params) if self.ids else self._answers(prompts, params)

    def _answers(self, prompts: list[dict[str, Any]], params: list[SamplingParams]) -> list[Any]:
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        told = ids[1:] + ids[:1] if self.faults.change_token else ids
        return [
            SimpleNamespace(prompt_token_ids=said, outputs=[self._answer(prompt, asked)])
            for said, prompt, asked in zip(told, ids, params, strict=True)
        ]

    def _compute(self, prompts: list[dict[str, Any]], params: list[SamplingParams]) -> None:
        free = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()
        waiting = [
            Request(f"r{i}", list(prompt["prompt_token_ids"]), asked)
            for i, (prompt, asked) in enumerate(zip(prompts, params, strict=True))
            if i != self.faults.forget
        ]
        if self.faults.change_token:
            waiting[0].prompt_token_ids[-1] += 1
        while waiting:
            step, room = [], self.arguments["max_num_batched_tokens"]
            for request in waiting:
                count = min(room, len(request.prompt_token_ids) - request.computed)
                if count:
                    step.append((request, count))
                    room -= count
            self._run(step, free)
            for request, count in step:
                request.computed += count
                if request.computed == len(request.prompt_token_ids):
                    self.scheduler.request_finished_all_groups(SimpleNamespace(request_id=request.req_id), ())
                    free += request.blocks
            waiting = [r for r in waiting if r.computed < len(r.prompt_token_ids)]

    def _run(self, step: list[tuple[Request, int]], free: list[int]) -> None:
        new, known = [], SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        for request, count in step:
            needed = -(-(request.computed + count) // BLOCK) - len(request.blocks)
            blocks = [free.pop() for _ in range(needed)]
            request.blocks += blocks
            if request.computed == 0:
                new.append(request.as_new())
            else:
                known.req_ids.append(request.req_id)
                known.new_block_ids.append(([7] * needed, blocks) if blocks else None)
                known.num_computed_tokens.append(request.computed)
            self._fill(request, count)
        scheduled = {request.req_id: count for request, count in step}
        if self.faults.cut is not None:
            scheduled = {req_id: min(count, self.faults.cut) for req_id, count in scheduled.items()}
        output = SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=known, num_scheduled_tokens=scheduled)
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.worker.wait_for_save()

    def _fill(self, request: Request, count: int) -> None:
        states = self._states(request.prompt_token_ids)
        for t in range(request.computed, request.computed + count):
            self.cache[request.blocks[t // BLOCK], :, t % BLOCK] = states[t]

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
    }
    parts = base.split(".")
    parents = [".".join(parts[:i]) for i in range(1, len(parts))]
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
