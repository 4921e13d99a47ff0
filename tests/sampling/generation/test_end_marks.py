"""Which tokens end an answer, and who names them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from hiddentap.capture.sampling import Finish, SamplingParams, generate_with_capture
from hiddentap.capture.sampling.generation.end_marks import EndMarks
from support import tiny
from support.generation import greedy
from support.model_folder import VOCAB
from support.templates import CHATML, byte_tokenizer

MARKED = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
WITHOUT_MARK = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
# As gpt-oss: inside a conversation a turn ends otherwise than where it is the last.
OTHER_INSIDE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}{{ '</s>' if loop.last else '<|im_end|>' }}{% endfor %}"
)


def tokenizer_with(folder: Path, template: str | None, eos: str | None = None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(byte_tokenizer(folder, template))
    tokenizer.eos_token = eos
    return tokenizer


def config_of(generation: Any = None, model: Any = None) -> Any:
    return SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=generation), config=SimpleNamespace(eos_token_id=model)
    )


@pytest.mark.parametrize(
    ("template", "mark"),
    [(CHATML, "<|im_end|>"), (MARKED, "<|im_end|>"), (WITHOUT_MARK, None), (OTHER_INSIDE, "</s>"), (None, None)],
    ids=["chatml", "marked", "no mark", "other inside", "no template"],
)
def test_the_template_names_what_it_writes_after_a_last_answer(tmp_path: Path, template: str, mark: str | None) -> None:
    tokenizer = tokenizer_with(tmp_path, template)
    found = EndMarks.of(config_of(), tokenizer).as_json()
    assert found == ({} if mark is None else {"chat template": [tokenizer.convert_tokens_to_ids(mark)]})


def test_every_end_mark_that_is_named_counts_and_says_who_named_it(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, CHATML, eos="</s>")
    end, eos = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<|im_end|>", "</s>"))
    marks = EndMarks.of(config_of([7, 9], 11), tokenizer)
    assert marks.as_json() == {"generation config": [7, 9], "tokenizer": [eos], "chat template": [end]}
    assert marks.token_ids == {7, 9, eos, end}


def test_the_config_is_asked_where_the_generation_config_names_none() -> None:
    assert EndMarks.of(config_of(None, 11)).as_json() == {"config": [11]}
    assert EndMarks.of(config_of(3, 11)).as_json() == {"generation config": [3]}
    assert EndMarks.of(config_of()).token_ids == frozenset()


def test_an_answer_stops_at_the_templates_mark_though_the_generation_config_names_another(tmp_path: Path) -> None:
    model = tiny.build_llama(vocab_size=VOCAB, pad_token_id=None, eos_token_id=None)
    tokenizer = tokenizer_with(tmp_path, None)
    prompt = list(b"Once upon a time")
    free = greedy(model, prompt, 8)
    # The template ends an answer with the token that the model is about to write.
    mark = tokenizer.convert_ids_to_tokens(free[2])
    tokenizer.add_tokens([mark], special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + mark }}{% endfor %}".replace("mark", repr(mark))
    model.generation_config.eos_token_id = next(token for token in range(VOCAB) if token not in free)
    params = SamplingParams(max_new_tokens=8, temperature=0)
    at = free.index(free[2])
    (stopped,) = generate_with_capture(model, [prompt], params, layer_ids=[1], tokenizer=tokenizer)
    assert (list(stopped.token_ids), stopped.finish) == (free[: at + 1], Finish("stop_token"))
    params = SamplingParams(max_new_tokens=8, temperature=0, ignore_eos=True)
    (whole,) = generate_with_capture(model, [prompt], params, layer_ids=[1], tokenizer=tokenizer)
    assert list(whole.token_ids) == free
