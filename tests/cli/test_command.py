"""The command as a user types it: what it prints, what it leaves, how it ends."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hiddentap import CapturedDataset
from support import tiny
from support.kimi_templates import MARKS, ids, kimi_tokenizer, turn
from support.model_folder import CHATS, VOCAB, chat, llama_folder, model_folder, write_rows


def test_capture_fills_a_folder_and_sums_it_up(run, llama: Path, data: Path, tmp_path: Path) -> None:
    code, out, err = run("capture", "--model", llama, "--data", data, "--layer-ids", "0,2,3", "--out", tmp_path / "out")
    assert code == 0
    assert "5 captured, 0 rejected" in out
    assert "0, 2, 3 (layer_output), H = 32" in out
    assert str(tmp_path / "out") in out
    assert "plan: 5 samples" in err
    assert len(CapturedDataset(tmp_path / "out")) == 5


def test_quiet_says_nothing(run, llama: Path, data: Path, tmp_path: Path) -> None:
    assert run("capture", "--model", llama, "--data", data, "--layer-ids", "1", "--out", tmp_path / "o", "--quiet") == (
        0,
        "",
        "",
    )


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_quiet_that_ends_with_1_says_why_in_one_line(run, llama: Path, tmp_path: Path, more: list[str]) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"foo": 1}\n')
    common = ("--model", llama, "--data", data, "--quiet")
    code, out, err = run("capture", *common, "--layer-ids", "1", "--out", tmp_path / "out", *more)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "all 1 input rows were rejected" in err
    code, out, err = run("audit", *common)
    assert (code, out, err) == (1, "", "hiddentap: nothing was left to capture: all 1 input rows were rejected\n")
    data.write_text("")
    code, out, err = run("capture", *common, "--layer-ids", "1", "--out", tmp_path / "empty", *more)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "the input has no rows" in err
    data.write_text("{bad\n")
    code, out, err = run("audit", *common, "--strict")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "a run over this input would end with" in err


def test_short_names_of_dtypes_are_taken(run, llama: Path, data: Path, tmp_path: Path) -> None:
    common = ("capture", "--model", llama, "--data", data, "--layer-ids", "1", "--quiet")
    assert run(*common, "--out", tmp_path / "a", "--dtype", "bf16", "--store-dtype", "fp32")[0] == 0
    about = CapturedDataset(tmp_path / "a").metadata
    assert (about["compute_dtype"], about["store_dtype"]) == ("bfloat16", "float32")


def test_the_same_command_again_is_done_at_once(run, llama: Path, data: Path, tmp_path: Path) -> None:
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "1", "--out", tmp_path / "out")
    run(*command)
    code, out, _ = run(*command)
    assert code == 0
    assert "done before  1 shard(s)" in out
    assert "speed        nothing was left to capture" in out
    assert "tokens/s" not in out


LAYER_IDS = [
    (None, "DSPARK requires explicit layer_ids for aux hidden capture."),
    ("", "DSPARK requires at least one target layer for aux hidden capture."),
    ("1,1", "DSPARK target layer_ids must be unique and strictly increasing."),
    ("2,1", "DSPARK target layer_ids must be unique and strictly increasing."),
    ("-1", "DSPARK target layer_ids are outside the decoder range: [-1]; num_hidden_layers=4."),
    ("0,4", "DSPARK target layer_ids are outside the decoder range: [4]; num_hidden_layers=4."),
    ("1.0", "DSPARK target layer_ids must be plain integers; got '1.0' (str)."),
    ("True", "DSPARK target layer_ids must be plain integers; got 'True' (str)."),
    ("1,,2", "DSPARK target layer_ids must be plain integers; got '' (str)."),
]


@pytest.mark.parametrize(("ids", "text"), LAYER_IDS, ids=[repr(i) for i, _ in LAYER_IDS])
def test_bad_layer_ids_are_one_line_and_code_2(run, llama, data, tmp_path, ids: str | None, text: str) -> None:
    given = [] if ids is None else ["--layer-ids", ids]
    code, out, err = run("capture", "--model", llama, "--data", data, "--out", tmp_path / "out", *given)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"hiddentap: {text}")
    assert not (tmp_path / "out").exists()


def test_more_than_one_pipeline_stage_is_code_2_with_its_text(run, llama, data, tmp_path, monkeypatch) -> None:
    from hiddentap.capture.run.engines.hugging_face import backend as hugging_face_backend
    from hiddentap.models.pipeline import PipelineGroup

    load = hugging_face_backend.load_model

    def on_two_stages(*arguments: object) -> object:
        loaded = load(*arguments)
        loaded.model.pp_group = PipelineGroup(world_size=2, rank_in_group=1)
        return loaded

    monkeypatch.setattr(hugging_face_backend, "load_model", on_two_stages)
    code, _, err = run("capture", "--model", llama, "--data", data, "--out", tmp_path / "out", "--layer-ids", "1")
    assert (code, err.splitlines()[-1]) == (2, "hiddentap: DSPARK aux hidden capture requires PP=1.")


CAPTURE = ["capture", "--model", "{llama}", "--data", "{data}", "--layer-ids", "1"]
WRONG_USE = [
    (["capture"], "Missing option '--model'"),
    (["capture", "--modle", "x"], "No such option"),
    (["captrue"], "No such command"),
    (["capture", "--model", "{nowhere}", *CAPTURE[3:], "--out", "{out}"], "cannot be loaded as a model"),
    ([*CAPTURE, "--out", "{data}"], "is a file"),
    ([*CAPTURE, "--out", "{data}/x"], "chats.jsonl/x cannot be made, because "),
    ([*CAPTURE, "--out", "{data}/x/y", "--dry-run"], "chats.jsonl is a file; choose another folder."),
    ([*CAPTURE, "--data", "{nowhere}.jsonl", "--out", "{out}"], "found nothing there; check the path"),
    ([*CAPTURE, "--data", "{nowhere}.jsonl", "--out", "{out}", "--dry-run"], "found nothing there; check the path"),
    ([*CAPTURE, "--data", "{nowhere}", "--out", "{out}"], "found nothing at"),
    ([*CAPTURE, "--data", "{llama}", "--out", "{out}"], "found a folder that save_to_disk did not write"),
    ([*CAPTURE, "--out", "{out}", "--chat-template", "{nowhere}"], "cannot be read"),
    ([*CAPTURE[:5], "--ids-of", "vllm", "--draft-config", "{nowhere}", "--out", "{out}"], "nowhere"),
    (["audit", "--model", "{llama}", "--data", "{nowhere}.jsonl", "--quiet"], "found nothing there; check the path"),
    (["generate", *CAPTURE[1:3], *CAPTURE[5:], "--data", "{nowhere}.jsonl", "--out", "{out}"], "found nothing there"),
    (["generate", *CAPTURE[1:], "--out", "{data}/x"], "chats.jsonl is a file; choose another folder."),
    ([*CAPTURE, "--out", "{llama}"], "was not made by hiddentap"),
    ([*CAPTURE, "--out", "{out}", "--final", "x"], "Invalid value"),
    ([*CAPTURE, "--out", "{out}", "--limit", "0"], "Invalid value"),
    ([*CAPTURE, "--out", "{out}", "--engine", "jax"], "'jax' is not"),
    ([*CAPTURE, "--out", "{out}", "--workers", "2"], "need --engine ray"),
    ([*CAPTURE, "--out", "{out}", "--template-arg", "x"], "expected K=V"),
    ([*CAPTURE, "--out", "{out}", "--device", "tpu9x"], "device"),
    ([*CAPTURE, "--out", "{out}", "--device", "cuda:9"], "there is no device 'cuda:9' here"),
    ([*CAPTURE, "--out", "{out}", "--device", "mps:4"], "there is no device 'mps:4' here"),
    ([*CAPTURE, "--out", "s3://bucket/run1"], "s3://bucket/run1 is an address"),
    ([*CAPTURE, "--out", "hf://datasets/a/b", "--dry-run"], "hf://datasets/a/b is an address"),
    (["export", "{llama}", "--to", "deepspec", "--dest", "gs://a/b"], "gs://a/b is an address"),
    (["import", "{llama}", "--from", "deepspec", "--out", "gs://a/b"], "gs://a/b is an address"),
    ([*CAPTURE, "--out", "{out}", "--exact", "--batch-tokens", "9"],
     "exact runs one sample a forward"),
    (["layers", "{nowhere}"], "cannot be loaded as a model"),
    (["inspect", "{nowhere}"], "is not there"),
    (["inspect", "{llama}"], "holds no sealed shard"),
    (["inspect", "{nowhere}", "--sample", "a"], "is not there"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "text"), WRONG_USE, ids=[" ".join(a) + f" ({t})" for a, t in WRONG_USE])
def test_wrong_use_is_one_clear_line_and_code_2(run, llama, data, tmp_path, arguments: list[str], text: str) -> None:
    places = {"llama": llama, "data": data, "out": tmp_path / "out", "nowhere": tmp_path / "nowhere"}
    code, out, err = run(*(a.format(**places) for a in arguments))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert text in err


def test_a_damaged_source_is_code_1_and_no_complete_dump(run, llama: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "cut.jsonl.gz"
    import gzip

    damaged.write_bytes(gzip.compress(json.dumps(CHATS[0]).encode() * 50)[:-9])
    code, _, err = run("capture", "--model", llama, "--data", damaged, "--layer-ids", "1", "--out", tmp_path / "out")
    assert code == 1
    assert str(damaged) in err
    assert not (tmp_path / "out/plan/plan.json").exists()


def test_a_text_file_is_said_to_be_no_safetensors_file(run, data: Path) -> None:
    code, out, err = run("inspect", data)
    assert (code, out) == (1, "")
    assert err == f"hiddentap: {data}: is no safetensors file: no header begins at its byte 8.\n"


def test_nothing_captured_is_code_1(run, llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text("{bad\n")
    code, out, _ = run("capture", "--model", llama, "--data", data, "--layer-ids", "1", "--out", tmp_path / "out")
    assert code == 1
    assert "0 captured, 1 rejected" in out
    assert "speed     nothing was captured" in out
    assert "rejects.jsonl" in out


def test_strict_is_code_1_at_the_first_reject(run, llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text(json.dumps(CHATS[0]) + "\n{bad\n")
    code, _, err = run(
        "capture", "--model", llama, "--data", data, "--layer-ids", "1", "--out", tmp_path / "o", "--strict"
    )
    assert code == 1
    assert f"{data}, line 2" in err


def test_template_arguments_reach_the_template(run, tmp_path: Path, data: Path) -> None:
    template = "{% for m in messages %}{{ m.role + sign + m.content + '<|im_end|>' }}{% endfor %}"
    folder = model_folder(tmp_path / "m", tiny.build_llama(vocab_size=VOCAB, pad_token_id=None), template)
    code, out, _ = run(
        "audit", "--model", folder, "--data", data, "--template-arg", "sign=>>", "--row", 2, "--loss-on", "assistant"
    )
    assert code == 0
    assert "user>>Is it?<|im_end|>assistant>>[[No.<|im_end|>]]" in out


def test_a_template_from_a_file_is_used(run, llama: Path, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}{{ '(' + m.role + ')' + m.content + '</s>' }}{% endfor %}")
    code, out, _ = run("audit", "--model", llama, "--data", data, "--chat-template", file)
    assert code == 0
    assert "(user)How far is it?</s>(assistant)[[About three miles.</s>]]" in out


def test_thinking_is_masked_on_request_and_part_of_the_runs_identity(run, llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps(chat("Q", "<think>hm</think>yo")))
    kept, masked = (run("audit", "--model", llama, "--data", data, "--think", think)[1] for think in ("keep", "mask"))
    assert "[[<think>hm</think>yo<|im_end|>]]" in kept
    assert "<think>hm</think>[[yo<|im_end|>]]" in masked
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "1", "--out", tmp_path / "out", "--think")
    assert run(*command, "mask")[0] == 0
    code, _, err = run(*command, "keep")
    assert (code, 'tokenisation.think: "mask" -> "keep"' in err) == (2, True), err


def test_turns_of_kimis_ids_are_marked_on_request(run, tmp_path: Path) -> None:
    model = tiny.build_llama(vocab_size=len(MARKS) + 256, pad_token_id=None)
    folder = tmp_path / "m"
    model.save_pretrained(folder)
    kimi_tokenizer(folder)
    row = ids(*turn("user", "hi"), *turn("assistant", "yo"))
    data = tmp_path / "d.jsonl"
    data.write_text(json.dumps({"input_ids": row}) + "\n" + json.dumps({"input_ids": row[1:]}))
    code, out, _ = run("audit", "--model", folder, "--data", data, "--ids-format", "kimi", "--allow-rejects")
    assert code == 0
    assert "<|im_assistant|>assistant<|im_middle|>[[yo<|im_end|>]]" in out
    assert "kimi_tokens 1" in out
    assert "1 no_kimi_turns" in out


def test_audit_counts_what_a_run_would_do(run, llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join([json.dumps(CHATS[0]), "{bad", json.dumps(chat("Q" * 90, "A" * 90, id="long"))]))
    code, out, _ = run("audit", "--model", llama, "--data", data, "--max-length", 60)
    assert code == 0
    assert "3: 1 would be captured, 2 rejected" in out
    assert f"{data}:2" in out


@pytest.mark.parametrize("command", ["audit", "capture"])
def test_audit_and_dry_run_say_that_a_strict_run_would_end(run, llama: Path, tmp_path: Path, command: str) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join([json.dumps(CHATS[0]), "{bad"]))
    more = ("--layer-ids", "0", "--out", tmp_path / "out", "--dry-run") if command == "capture" else ()
    code, _, err = run(command, "--model", llama, "--data", data, "--strict", *more)
    assert code == 1
    assert f"a run over this input would end with: {data}, line 2" in err


def test_a_dry_run_says_what_it_would_fill_and_writes_nothing(run, llama: Path, data: Path, tmp_path: Path) -> None:
    code, out, _ = run(
        "capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--out", tmp_path / "out", "--dry-run"
    )
    assert code == 0
    assert not (tmp_path / "out").exists()
    assert "5: 5 would be captured, 0 rejected" in out
    assert re.search(r"tap +layer 2: output of model.layers.2, the state after 3 layers", out)
    assert re.search(r"tap +pre-norm: input of model.norm, the state after 4 layers", out)
    tokens = int(out.split("tokens  ")[1].split(",")[0].split()[0])
    # Two layers and the pre-norm of 32 float32 each, an int32 id and a mask byte.
    assert f"{tokens * (3 * 32 * 4 + 5) / 1000:.1f} kB of rows" in out
    assert "tokens/s" in out


def test_a_dry_run_with_streamed_weights_says_what_blocks_read_and_hold(run, llama: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": list(range(3, 23))}] * 20)
    command = (
        "capture",
        "--model",
        llama,
        "--data",
        data,
        "--layer-ids",
        "0,2",
        "--out",
        tmp_path / "out",
        "--dry-run",
    )
    streamed = ("--stream-weights", "--shard-rows", 100, "--block-tokens", 200, "--batch-tokens", 50)
    code, out, _ = run(*command, *streamed)
    assert code == 0
    # 400 tokens in shards of 100 rows, two shards a block; of the five samples of a shard, two share a batch.
    assert re.search("blocks +2 of 200 tokens in about 6 batches", out)
    block = json.loads(run(*command, *streamed, "--json")[1])["block"]
    # Of each layer: queries and outputs 32 x 32, keys and values 16 x 32, three of the MLP 64 x 32, two norms; float32.
    layer = 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32)
    assert (block["bytes_per_block"], block["bytes_read"]) == (4 * layer, 8 * layer)
    # Embeddings and the final norm; two layers, the pre-norm and three states on the way of 200 positions.
    assert (block["layer_bytes"], block["outside_bytes"]) == (layer, 4 * (VOCAB * 32 + 32))
    assert block["state_bytes"] == 200 * (2 + 1 + 3) * 32 * 4
    assert block["seconds"] > 0
    assert not (tmp_path / "out").exists()
    assert json.loads(run(*command, "--json")[1])["block"] is None


def test_layers_says_what_streamed_weights_need(run, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m", num_hidden_layers=12)
    streamed = json.loads(run("layers", folder, "--json")[1])["streamed"]
    layer = 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32)
    outside = 4 * (VOCAB * 32 + 32)  # embeddings and the final norm; the head is read with --head alone
    assert streamed == {"memory": 2 * layer + outside, "layer": layer, "outside": outside, "read": 12 * layer}
    assert f"--stream-weights  reads up to {12 * layer / 1000:.1f} kB for each block" in run("layers", folder)[1]


def test_a_dry_run_halves_what_does_not_fit_and_ends_with_words_where_one_sample_does_not(
    run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hiddentap.capture.run.engines.hugging_face.engine import HuggingFaceEngine

    data = tmp_path / "alike.jsonl"
    data.write_text("\n".join(json.dumps(CHATS[0]) for _ in range(8)))
    forward, sizes = HuggingFaceEngine.forward, []

    def forward_up_to(most: int):
        def limited(engine, batch):
            sizes.append(batch.positions.B * batch.positions.S)
            if sizes[-1] > most:
                raise torch.OutOfMemoryError("no room")
            return forward(engine, batch)

        return limited

    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "0", "--out", tmp_path / "out", "--dry-run")
    monkeypatch.setattr(HuggingFaceEngine, "forward", forward_up_to(150))
    code, out, err = run(*command)
    assert (code, "tokens/s" in out) == (0, True), err
    assert f"a batch of {max(sizes)} positions did not fit cpu; trying smaller ones" in err
    assert max(sizes) > 150 >= min(sizes)
    monkeypatch.setattr(HuggingFaceEngine, "forward", forward_up_to(0))
    code, _, err = run(*command)
    assert code == 1
    assert "does not fit the memory of cpu; lower --max-length" in err


def test_a_disk_without_room_is_refused_before_the_first_forward_unless_forced(
    run, llama, data, tmp_path, monkeypatch
) -> None:
    from hiddentap.capture.run import estimate, space

    monkeypatch.setattr(space, "free_bytes", lambda folder: 1000)
    monkeypatch.setattr(estimate, "free_bytes", lambda folder: 1000)
    command = ("capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--out", tmp_path / "out")
    code, _, err = run(*command)
    assert code == 1
    assert "its disk has 0.0 GB free" in err
    assert run(*command, "--dry-run")[0] == 1
    assert run(*command, "--force")[0] == 0


def test_layers_shows_both_conventions_side_by_side(run, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m", num_hidden_layers=12)
    code, out, _ = run("layers", folder)
    size = (folder / "model.safetensors").stat().st_size
    assert re.search(rf"form +unquantized, F32; {size:,} bytes on disk", out)
    assert code == 0
    assert "12 x LlamaDecoderLayer at model.layers" in out
    assert "eagle3           1,5,8                   2,6,9" in out
    assert "dflash           1,3,5,7,9               2,4,6,8,10" in out
    assert "dspark           1,4,6,8,11              2,5,7,9,12" in out


def test_layers_shows_each_systems_ids_with_their_meaning(run, tmp_path: Path) -> None:
    code, out, _ = run("layers", llama_folder(tmp_path / "m", num_hidden_layers=12))
    assert code == 0
    (vllm,) = (line for line in out.splitlines() if line.startswith("speculators"))
    assert vllm.split()[:3] == ["speculators", "0..12", "2,6,9"]
    (specforge,) = (line for line in out.splitlines() if line.startswith("specforge"))
    assert specforge.split()[:3] == ["specforge", "0..11", "1,5,8"]


def test_layers_says_ids_in_each_systems_terms(run, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m", num_hidden_layers=12)
    code, out, _ = run("layers", folder, "--layer-ids", "2,6,12", "--ids-of", "vllm")
    assert code == 0
    told = out.split("the same as")[1].splitlines()
    assert told[0].strip() == "(vllm 2,6,12: boundary 2, boundary 6, boundary 12)"
    assert "layer_output      1,5,11" in told
    assert "boundary          2,6,12" in told
    (specforge,) = (line for line in told if line.startswith("specforge "))
    assert specforge.startswith(
        "specforge         - specforge has no id that gives boundary 12: SGLang accepts that id"
    )
    code, _, err = run("layers", folder, "--layer-ids", "1,12")
    assert (code, "[12]" in err) == (2, True)


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: tiny.build("kimi_linear"), "generation        Kimi Linear, read plainly"),
        (tiny.build_kimi_k25, "generation        Kimi K2.5, read plainly"),
    ],
    ids=["linear", "k2.5"],
)
def test_layers_names_the_generation_of_a_kimi_model(run, tmp_path: Path, build, told: str) -> None:
    build().save_pretrained(tmp_path / "m")
    code, out, _ = run("layers", tmp_path / "m")
    assert (code, told in out) == (0, True), out


def test_layers_names_no_generation_of_other_models(run, llama: Path) -> None:
    assert "generation" not in run("layers", llama)[1]


NAMED_LAYERS = [
    (["--layer-ids", "1,3", "--ids-of", "vllm"], [0, 2], [1, 3], "layer_output"),
    (["--layer-ids", "-1,2", "--ids-of", "deepspec"], [0, 3], [0, 3], "boundary"),
    (["--draft-config", "{draft}", "--ids-of", "specforge"], [0, 2], [1, 3], "layer_output"),
    (["--draft-config", "{draft}", "--ids-of", "vllm"], [0, 2], [1, 3], "layer_output"),
    (["--draft-config", "{draft}", "--ids-of", "boundary"], [0, 2], [0, 2], "boundary"),
    (["--draft-config", "{draft}", "--convention", "boundary"], [0, 2], [0, 2], "boundary"),
    (["--layer-ids", "1,3", "--ids-of", "boundary"], [1, 3], [1, 3], "boundary"),
    (["--layer-ids", "1,3", "--convention", "boundary"], [1, 3], [1, 3], "boundary"),
    (["--layer-ids", "0,2", "--ids-of", "layer_output"], [0, 2], [1, 3], "layer_output"),
]


@pytest.mark.parametrize(
    ("given", "ids", "boundaries", "convention"), NAMED_LAYERS, ids=[" ".join(g) for g, *_ in NAMED_LAYERS]
)
def test_layers_can_be_named_in_another_systems_ids(
    run, llama, data, tmp_path, given, ids, boundaries, convention
) -> None:
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps({"dflash_config": {"target_layer_ids": [0, 2]}}))
    options = [option.format(draft=draft) for option in given]
    code, _, err = run("capture", "--model", llama, "--data", data, "--out", tmp_path / "out", *options)
    assert (code, "Traceback" in err) == (0, False)
    taps = json.loads((tmp_path / "out/manifest.json").read_text())["identity"]["taps"]
    assert (taps["layer_ids"], taps["boundaries"], taps["convention"]) == (ids, boundaries, convention)


def test_an_algorithms_default_layers_are_those_of_the_named_system(run, data, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m", num_hidden_layers=12)
    common = ("capture", "--model", folder, "--data", data, "--algorithm", "dflash")
    assert run(*common, "--out", tmp_path / "out", "--ids-of", "vllm")[0] == 0
    taps = json.loads((tmp_path / "out/manifest.json").read_text())["identity"]["taps"]
    assert taps["boundaries"] == [2, 6, 9]


def test_an_algorithm_takes_its_default_layers(run, data, tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "m", num_hidden_layers=12)
    assert run("capture", "--model", folder, "--data", data, "--out", tmp_path / "out", "--algorithm", "eagle3")[0] == 0
    assert json.loads((tmp_path / "out/manifest.json").read_text())["identity"]["taps"]["layer_ids"] == [1, 5, 8]


def test_layers_named_in_two_ways_or_by_a_draft_config_of_nobody_are_refused(run, llama, data, tmp_path) -> None:
    common = ("capture", "--model", llama, "--data", data, "--out", tmp_path / "out")
    code, _, err = run(*common, "--layer-ids", "1", "--algorithm", "eagle3")
    assert code == 2
    assert "named in 2 ways" in err
    code, _, err = run(*common, "--draft-config", tmp_path / "c.json")
    assert code == 2
    assert "does not say what its ids mean" in err
    for system in ("vllm", "boundary", "layer_output"):
        code, _, err = run(*common, "--layer-ids", "1", "--convention", "layer_output", "--ids-of", system)
        assert code == 2
        assert f"named twice: convention layer_output (--convention) and system {system} (--ids-of); give one" in err
    code, _, err = run(*common, "--layer-ids", "1", "--ids-of", "nonsense")
    assert code == 2
    assert "unknown system of layer ids 'nonsense'" in err
    code, _, err = run(*common, "--layer-ids", "1", "--adapter", "nonsense")
    assert code == 2
    assert "unknown adapter 'nonsense'" in err


def test_inspect_reads_a_folder_a_shard_and_a_sample(run, llama: Path, data: Path, tmp_path: Path) -> None:
    out_folder = tmp_path / "out"
    run("capture", "--model", llama, "--data", data, "--layer-ids", "0,2", "--out", out_folder)
    for path in (out_folder, out_folder / "shards/shard-000000.safetensors"):
        code, out, _ = run("inspect", path)
        assert code == 0
        assert "0, 2 (layer_output), boundaries 1, 3" in out
        assert "(R, 2, 32) float32" in out
    code, out, _ = run("inspect", out_folder, "--sample", "b")
    assert code == 0
    assert "[[No.<|im_end|>]]" in out
    code, _, err = run("inspect", out_folder, "--sample", "zz")
    assert (code, err.strip()) == (2, f"hiddentap: {out_folder} holds no sample 'zz'.")
    code, out, _ = run("inspect", out_folder, "--json")
    assert json.loads(out)["metadata"]["taps"]["layer_ids"] == [0, 2]


def test_a_layer_that_names_no_model_weight_is_refused(run, llama: Path, data: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    broken.mkdir()
    for file in llama.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    code, _, err = run("capture", "--model", broken, "--data", data, "--layer-ids", "1", "--out", tmp_path / "out")
    assert code == 2
    assert "1 weights of LlamaForCausalLM are not in" in err
    assert "model.layers.2.mlp.up_proj.weight" in err


def test_the_installed_command_and_the_module_answer_without_torch() -> None:
    script = "import sys, hiddentap.capture.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    asked = subprocess.run([sys.executable, "-m", "hiddentap", "--help"], capture_output=True, text=True, check=False)
    assert asked.returncode == 0
    assert "capture" in asked.stdout


def test_every_public_name_can_be_imported_and_is_listed_once() -> None:
    import hiddentap

    assert list(hiddentap.__all__) == sorted(set(hiddentap.__all__))
    assert set(hiddentap.__all__) == set(hiddentap._MODULE_OF)
    assert all(getattr(hiddentap, name) is not None for name in hiddentap.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        hiddentap.nonsense  # noqa: B018
