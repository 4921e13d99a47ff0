"""Layers loaded one by one have the bits of `from_pretrained`, and forwards paused between them those of plain forwards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch
from greenlet import getcurrent
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaForCausalLM

from hiddentap.models.checkpoint import CheckpointError
from hiddentap.models.decoder import find_decoder
from hiddentap.models.errors import UsageError
from hiddentap.models.streaming import LayerStore, LayerSweep, load_streamed
from hiddentap.models.streaming.checkpoint_reader import CheckpointReader
from support import architectures, tiny

FAMILIES = [
    "llama", "gpt_oss", "deepseek_v3", "kimi_linear", "gemma2", "gemma4_text", "recurrent_gemma", "cohere", "gpt2", "dbrx",
    "gpt_neox_japanese", "bloom", "falcon_h1", "zaya", "xlstm", "mamba2", "zamba2", "lfm2", "nanochat", "bert", "opt", "bart",
    "longcat_flash", "llama4_text", "qwen2_moe", "qwen3_next", "jetmoe", "deepseek_v4", "gemma3n_text",
]  # fmt: skip
LENGTHS = (5, 7, 9)


def saved(model: nn.Module, folder: Path, **how: object) -> Path:
    model.save_pretrained(folder, **how)
    return folder


def plain(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def streamed(folder: Path, **how: bool) -> LayerStore:
    model, store = load_streamed(lambda: AutoModelForCausalLM.from_pretrained(folder), **how)
    model.eval()
    return store


def weights(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def outputs_of(layers: tuple[nn.Module, ...], forward: Callable[[Tensor], object]) -> Callable[[Tensor], list[Tensor]]:
    """A forward that returns what each layer gave out, also where several run in turn."""
    taken: dict[object, list[Tensor]] = {}

    def take(_module: nn.Module, _args: object, output: object) -> None:
        state = output[0] if isinstance(output, (tuple, list)) else output
        taken[getcurrent()].append(state.clone())

    for layer in layers:
        layer.register_forward_hook(take)

    def run(ids: Tensor) -> list[Tensor]:
        taken[getcurrent()] = mine = []
        forward(ids)
        return mine

    return run


class Stopped(Exception):  # noqa: N818
    """Ends a forward after a layer."""


def stop(*_: object) -> None:
    raise Stopped


@contextmanager
def forbidden_reads() -> Iterator[None]:
    """Fail where a weight is read inside the block."""
    with mock.patch.object(CheckpointReader, "read", side_effect=AssertionError("a weight was read")):
        yield


def bytes_of_read_calls() -> int:
    """Bytes that this process, all its threads, has got from read calls, from files and else."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


# One for each way in which states pass between layers; all families are in tests/architectures/test_families.py.
PAUSED = ["llama", "zamba2", "xlstm", "gemma3n_text", "bart", "deepseek_v4"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(architectures.build(request.param), tmp_path)


def test_each_layer_is_loaded_with_the_bits_of_from_pretrained_and_dropped_again(family: Path) -> None:
    expected, store = weights(plain(family)), streamed(family, head=True)
    model = store.decoder.model
    before = {name for name, tensor in weights(model).items() if tensor.device.type == "meta"}
    assert before
    assert all(name.startswith(f"{store.decoder.layers_path}.") for name in before)
    for i in range(store.n):
        prefix = f"{store.decoder.layer_path(i)}."
        store.load(i)
        found = {name: tensor for name, tensor in weights(model).items() if name.startswith(prefix)}
        assert found
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        assert all(tensor.dtype == expected[name].dtype for name, tensor in found.items())
        store.release(i)
    after = {name for name, tensor in weights(model).items() if tensor.device.type == "meta"}
    assert after == before


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_of_a_layer_need_gradients_as_those_of_a_model_in_memory(frozen: bool, tmp_path: Path) -> None:
    folder = saved(architectures.build("falcon_mamba"), tmp_path)
    store = streamed(folder)
    model = store.decoder.model.requires_grad_(not frozen)
    expected = weights(plain(folder).requires_grad_(not frozen))
    prefix = f"{store.decoder.layer_path(1)}."
    for _ in range(2):
        store.load(1)
        found = {name: weight.requires_grad for name, weight in weights(model).items() if name.startswith(prefix)}
        store.release(1)
        assert found == {name: expected[name].requires_grad for name in found}
        assert any(found.values()) is not frozen


@pytest.mark.parametrize("model_type", PAUSED)
def test_forwards_paused_at_each_layer_give_the_bits_of_plain_ones(model_type: str, tmp_path: Path) -> None:
    family = saved(architectures.build(model_type), tmp_path)
    model, store = plain(family), streamed(family, head=True)
    batches = [architectures.token_ids(2, length, seed=length) for length in LENGTHS]
    whole = outputs_of(find_decoder(model).layers, lambda ids: model(ids, use_cache=False))
    paused = outputs_of(store.decoder.layers, lambda ids: store.decoder.model(ids, use_cache=False))
    with torch.inference_mode(), LayerSweep(store).attached() as sweep:
        expected = [whole(ids) for ids in batches]
        found = sweep.run([lambda ids=ids: paused(ids) for ids in batches])
        alone = paused(batches[0])
    for a, b in zip([*expected, expected[0]], [*found, alone], strict=True):
        assert len(a) == store.n == len(b)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_sweep_reads_each_layer_once_and_none_after_the_last_that_is_wanted(tmp_path: Path) -> None:
    store = streamed(saved(tiny.build_llama(num_hidden_layers=6), tmp_path))
    outside = store.reader.bytes_read
    llama = store.decoder.model.config
    assert outside == llama.vocab_size * 32 * 4 + 32 * 4  # embeddings and final norm; no head

    def forward() -> None:
        with pytest.raises(Stopped):
            store.decoder.model(architectures.token_ids(2, 5), use_cache=False)

    store.decoder.layers[2].register_forward_hook(stop)
    with torch.inference_mode(), LayerSweep(store).attached() as sweep:
        sweep.run([forward] * 8, layers=range(3))
    # Of each layer: queries and outputs 32 x 32, keys and values 16 x 32, three of the MLP 64 x 32, two norms; float32.
    layer = 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32)
    assert store.reader.bytes_read - outside == 3 * layer
    assert [store.bytes_of(i) for i in range(store.n)] == [layer] * 6


def test_at_most_two_layers_are_in_memory_while_a_sweep_runs(tmp_path: Path) -> None:
    store = streamed(saved(tiny.build_llama(num_hidden_layers=6), tmp_path))
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        here = [layer for layer in store.decoder.layers if next(layer.parameters()).device.type != "meta"]
        most = max(most, len(here))

    for layer in store.decoder.layers:
        layer.register_forward_hook(count)
    with torch.inference_mode(), LayerSweep(store).attached() as sweep:
        sweep.run([lambda: store.decoder.model(architectures.token_ids(2, 5), use_cache=False)] * 3)
    assert most in (1, 2)
    assert all(p.device.type == "meta" for layer in store.decoder.layers for p in layer.parameters())


def test_a_forward_that_fails_ends_the_others_and_drops_the_layers(tmp_path: Path) -> None:
    store = streamed(saved(tiny.build_llama(), tmp_path))
    ended: list[str] = []

    def good() -> None:
        try:
            store.decoder.model(architectures.token_ids(2, 5), use_cache=False)
        finally:
            ended.append("good")

    def bad() -> None:
        store.decoder.model(architectures.token_ids(2, 5) + 1000, use_cache=False)

    with torch.inference_mode(), LayerSweep(store).attached() as sweep:
        with pytest.raises(IndexError):
            sweep.run([good, bad])
        assert ended == ["good"]
    assert all(p.device.type == "meta" for layer in store.decoder.layers for p in layer.parameters())


def test_a_model_that_changes_its_own_weights_is_refused_before_any_is_read(tmp_path: Path) -> None:
    folder = saved(architectures.build("rwkv"), tmp_path)
    with forbidden_reads(), pytest.raises(UsageError, match=r"changes rwkv\.blocks\.0\..* in place while it runs"):
        streamed(folder)


class Looped(LlamaForCausalLM):
    """Its layers run twice."""

    def forward(self, *args: object, **kwargs: object) -> object:
        super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


class WithoutSecond(nn.ModuleList):
    """A list whose slices leave out layer 1."""

    def __getitem__(self, at: int | slice) -> object:
        return [m for i, m in enumerate(list(self)[at]) if i != 1] if isinstance(at, slice) else super().__getitem__(at)


class Skipping(LlamaForCausalLM):
    """Layer 1 never runs."""

    def __init__(self, config: object) -> None:
        super().__init__(config)
        self.model.layers = WithoutSecond(self.model.layers)


def test_layers_that_run_in_a_loop_are_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    folder = saved(tiny.build_llama(), tmp_path)
    with (
        forbidden_reads(),
        pytest.raises(UsageError, match=r"in the order 0, 1, 2, 3, 0, 1, 2, 3; weights are streamed"),
    ):
        load_streamed(lambda: Looped.from_pretrained(folder))


def test_layers_that_a_forward_skips_are_not_read(tmp_path: Path) -> None:
    folder = saved(tiny.build_llama(), tmp_path)
    model, store = load_streamed(lambda: Skipping.from_pretrained(folder), head=True)
    plain_model = Skipping.from_pretrained(folder).eval()
    ids = architectures.token_ids(2, 5)
    with torch.inference_mode(), LayerSweep(store).attached() as sweep:
        alone = model.eval()(ids, use_cache=False).logits
        assert sweep.order == (0, 2, 3)
        before = store.reader.bytes_read
        swept = sweep.run([lambda: model(ids, use_cache=False).logits] * 2, layers=sweep.order)
        expected = plain_model(ids, use_cache=False).logits
    assert store.reader.bytes_read - before == sum(store.bytes_of(i) for i in (0, 2, 3))
    assert all(torch.equal(found, expected) for found in (alone, *swept))


def test_a_head_that_is_not_loaded_does_not_keep_a_model_from_being_tried(tmp_path: Path) -> None:
    # The head of phi has a bias: a product of a state on the CPU with weights on the meta device raises.
    store = streamed(saved(architectures.build("phi"), tmp_path))
    model, ids = store.decoder.model, architectures.token_ids(2, 5)
    with torch.inference_mode(), LayerSweep(store).attached():
        with pytest.raises(RuntimeError, match="meta"):
            model(ids, use_cache=False)
        with store.without_head():
            logits = model(ids, use_cache=False).logits
    assert logits.shape == (2, 5, model.config.vocab_size)
    assert not logits.any()


def test_a_block_reads_from_its_files_what_the_reader_counts(tmp_path: Path) -> None:
    store = streamed(saved(tiny.build_llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=6), tmp_path))
    # Of each layer: queries and outputs 256 x 256, keys and values 128 x 256, three of the MLP 1024 x 256, two norms; float32.
    layer = 4 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 1024 * 256 + 2 * 256)
    ids = architectures.token_ids(2, 5)

    def forward() -> None:
        with suppress(Stopped):
            store.decoder.model(ids, use_cache=False)

    store.decoder.layers[3].register_forward_hook(stop)
    with torch.inference_mode(), LayerSweep(store).attached() as sweep:
        sweep.run([forward], layers=range(4))  # what Python imports on the way is read now
        counted, called = store.reader.bytes_read, bytes_of_read_calls()
        sweep.run([forward] * 8, layers=range(4))
        counted, called = store.reader.bytes_read - counted, bytes_of_read_calls() - called
    assert counted == 4 * layer
    assert counted <= called <= 1.02 * counted


@pytest.fixture
def cut_files(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint in several files, with an index."""
    yield saved(tiny.build_llama(num_hidden_layers=6), tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2


def test_layers_come_from_the_files_that_hold_them(cut_files: Path) -> None:
    expected, store = weights(plain(cut_files)), streamed(cut_files)
    for i in range(store.n):
        store.load(i)
    found = weights(store.decoder.model)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if name != "lm_head.weight")


def test_a_file_that_is_shorter_than_its_header_says_is_named(cut_files: Path) -> None:
    path = sorted(cut_files.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=rf"{path.name} has \d+ bytes, but .* ends at \d+"):
        streamed(cut_files)


def test_a_file_without_a_header_is_named(cut_files: Path) -> None:
    path = sorted(cut_files.glob("*.safetensors"))[1]
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match=f"{path.name} .*fetch the model again"):
        streamed(cut_files)


def test_a_layer_whose_weight_is_not_in_the_checkpoint_is_named(cut_files: Path) -> None:
    index = cut_files / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    lost = "model.layers.3.mlp.up_proj.weight"
    path = cut_files / named["weight_map"].pop(lost)
    index.write_text(json.dumps(named))
    from safetensors.torch import load_file, save_file

    save_file({key: value for key, value in load_file(path).items() if key != lost}, path, metadata={"format": "pt"})
    store = streamed(cut_files)
    with pytest.raises(CheckpointError, match=r"model\.layers\.3 cannot be loaded .*mlp\.up_proj\.weight"):
        store.load(3)
    assert next(store.decoder.layers[3].parameters()).device.type == "meta"


def test_a_checkpoint_that_is_not_safetensors_is_refused_with_the_way_out(tmp_path: Path) -> None:
    model = tiny.build_llama()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only safetensors files can be streamed"):
        streamed(tmp_path)


def test_an_image_text_model_streams_the_layers_of_its_text_decoder(tmp_path: Path) -> None:
    saved(tiny.build_kimi_k25(), tmp_path)
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    model, store = load_streamed(lambda: AutoModelForImageTextToText.from_pretrained(tmp_path))
    assert store.decoder.layers_path == "model.language_model.layers"
    for i in range(store.n):
        store.load(i)
    found = weights(model)
    assert all(torch.equal(found[k], v) for k, v in weights(whole).items() if k != "lm_head.weight")
