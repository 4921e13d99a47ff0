"""What ends a request, and which prompts a generation takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hiddentap.capture.sampling import Prompt, SamplingParams, generate_with_capture
from hiddentap.capture.sampling.generation.finish import Finish, StopConditions
from support import tiny
from support.generation import PROMPTS, greedy, lively
from support.model_folder import VOCAB
from support.templates import CHATML, byte_tokenizer

MOST = 12


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), CHATML))


@pytest.fixture(scope="module")
def model() -> Any:
    """A tiny Llama over bytes."""
    model = tiny.build_llama(vocab_size=VOCAB, pad_token_id=None, eos_token_id=None)
    model.generation_config.eos_token_id = None
    return model


def run(model: Any, prompt: Any, **options: Any) -> Any:
    params = SamplingParams(**({"temperature": 0, "max_new_tokens": MOST} | options.pop("params", {})))
    [result] = generate_with_capture(model, [prompt], params, layer_ids=[1], **options)
    return result


def first_new(tokens: list[int], start: int) -> int:
    return next(place for place in range(start, len(tokens)) if tokens[place] not in tokens[:place])


def test_the_models_own_end_token_ends_a_request_unless_it_is_ignored() -> None:
    model = lively("llama")
    output = greedy(model, PROMPTS[2], MOST)
    at = first_new(output, 3)
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [output[at], 5]
    try:
        result = run(model, PROMPTS[2])
        assert (list(result.token_ids), result.finish) == (output[: at + 1], Finish("stop_token"))
        ignoring = run(model, PROMPTS[2], params={"ignore_eos": True})
        assert (list(ignoring.token_ids), ignoring.finish) == (output, Finish("length"))
    finally:
        model.generation_config.eos_token_id = before


def test_stop_strings_end_a_request_with_the_token_that_completes_them(model: Any, tokenizer: Any) -> None:
    prompt = list(b"Once upon a time")
    text = run(model, prompt, tokenizer=tokenizer).text
    found = run(model, prompt, tokenizer=tokenizer, params={"stop": ["not there", text[3:6]]})
    assert found.finish == Finish("stop_string", text[3:6])
    assert found.text == text[: text.index(text[3:6]) + 3]


def test_a_stop_string_that_the_prompt_holds_ends_nothing(model: Any, tokenizer: Any) -> None:
    result = run(model, "Once upon", tokenizer=tokenizer, params={"stop": ["Once"]})
    assert result.finish_reason == "length"


def test_a_stop_string_across_characters_of_several_tokens_is_found() -> None:
    conditions = StopConditions(frozenset(), ("né",), 99, lambda ids: bytes(ids).decode("utf-8", "replace"))
    ids = list("année".encode())
    assert [conditions.finish_of(ids[:n]) is not None for n in range(1, len(ids) + 1)] == [False] * 4 + [True, True]


def test_conditions_are_asked_in_order_and_only_of_what_they_are_about() -> None:
    conditions = StopConditions(frozenset({7}), (), 3, None)
    assert conditions.finish_of([1]) is None
    assert conditions.finish_of([1, 7]) == Finish("stop_token")
    assert conditions.finish_of([1, 2, 7]) == Finish("stop_token")
    assert conditions.finish_of([1, 2, 3]) == Finish("length")


def test_stop_strings_need_a_tokenizer(model: Any) -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        run(model, [1, 2, 3], params={"stop": ["x"]})


def test_a_request_ends_where_the_model_has_no_more_positions() -> None:
    model = tiny.build("gpt2")
    ids = torch.randint(8, 80, (250,)).tolist()
    result = run(model, ids, params={"ignore_eos": True, "max_new_tokens": 50})
    # 256 positions: 250 of the prompt, 6 of new tokens, and the last token needs none.
    assert len(result.token_ids) == 7
    assert result.finish_reason == "length"
    with pytest.raises(ValueError, match="expected at most 256 tokens"):
        run(model, ids + ids[:7])


def test_texts_and_conversations_become_prompts_and_results_have_texts(model: Any, tokenizer: Any) -> None:
    text = run(model, "Hello", tokenizer=tokenizer)
    assert list(text.prompt_ids) == tokenizer("Hello")["input_ids"]
    assert text.text == tokenizer.decode(list(text.token_ids), skip_special_tokens=True)
    chat = run(model, [{"role": "user", "content": "Hi"}], tokenizer=tokenizer)
    assert tokenizer.decode(list(chat.prompt_ids)) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    answered = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    assert run(model, answered, tokenizer=tokenizer).prompt_ids == chat.prompt_ids
    assert run(model, [5, 6]).text is None


@pytest.mark.parametrize(
    ("prompts", "text"),
    [
        ([[]], r"prompt 0: expected at least one token; found none"),
        ([[3], [3, 259]], r"prompt 1: expected ids within 0\.\.258; found 259"),
        ([[3, -1]], r"prompt 0: expected ids within 0\.\.258; found -1"),
        (["text"], "prompt 0 is no list of token ids; give a tokenizer"),
        ([[1], [{"role": "user", "content": "x"}]], "prompt 1 is no list of token ids; give a tokenizer"),
        ("text", "found one string"),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_by_their_place(model: Any, prompts: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        generate_with_capture(model, prompts, SamplingParams(), layer_ids=[1])


def test_a_conversation_that_is_an_answer_alone_is_refused(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="prompt 0: expected a turn before the assistant's"):
        run(model, [{"role": "assistant", "content": "Hello."}], tokenizer=tokenizer)


def test_a_prompt_may_bring_its_own_name(model: Any) -> None:
    assert run(model, Prompt((5, 6), "mine")).prompt_ids == (5, 6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_batch": 0}, "max_batch must be at least 1; got 0"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1"),
        ({"prompt_lookup": -1}, "prompt_lookup must be at least 0"),
        ({"sampling_mask_max_tokens": 0}, "sampling_mask_max_tokens must be at least 1; got 0"),
        ({"params": [SamplingParams()] * 2}, "one for each of 1; found 2"),
        ({"layer_ids": [2, 1]}, "must be unique and strictly increasing"),
        ({"layer_ids": [9]}, r"outside the decoder range: \[9\]; num_hidden_layers=4"),
        ({"layer_ids": None}, "DSPARK requires explicit layer_ids for aux hidden capture."),
        ({"layer_ids": [], "out": Path("nowhere")}, "give layer_ids, or no out"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(model: Any, options: dict[str, Any], text: str) -> None:
    arguments = {"params": SamplingParams(), "layer_ids": [1]} | options
    with pytest.raises(ValueError, match=text):
        generate_with_capture(model, [[3, 4]], **arguments)


def test_no_prompt_gives_no_result(model: Any) -> None:
    assert generate_with_capture(model, [], SamplingParams(), layer_ids=[1]) == []
