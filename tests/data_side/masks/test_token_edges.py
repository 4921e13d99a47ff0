"""Tokens at the edges of a turn, for tokenizers that merge, trim, normalise, or tell no characters."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from hiddentap.models.errors import UsageError
from support.rows import reject_of, sample_of, supervised_texts, tokenise_rows, turns
from support.templates import CHATML, byte_tokenizer, merging_tokenizer, save

COLON = "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"


def test_a_token_across_the_start_of_an_answer_is_not_supervised_and_counted(tmp_path: Path) -> None:
    tokenizer = merging_tokenizer(tmp_path / "t", CHATML, merges=(("Ċ", "Ċ"),))

    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "\nyo")})

    # 19 tokens up to the word assistant, then the header's newline merged with the answer's.
    assert sample.loss_mask.tolist() == [*[0] * 19, 0, 1, 1, 1, 0]
    assert supervised_texts(tokenizer, sample) == ["yo<|im_end|>"]
    assert sample.warnings == ("token_straddles_span",)


@pytest.mark.parametrize("wrap", [lambda step: step, lambda step: processors.Sequence([step])], ids=["alone", "inside"])
@pytest.mark.parametrize("trim", [False, True])
def test_trimmed_offsets_hide_no_token_across_the_start(tmp_path: Path, trim: bool, wrap) -> None:
    step = wrap(processors.ByteLevel(trim_offsets=trim))
    tokenizer = merging_tokenizer(tmp_path / "t", COLON, merges=(("Ġ", "y"),), post_processor=step)

    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "yo")})

    assert supervised_texts(tokenizer, sample) == ["o</s>"]
    assert sample.warnings == ("token_straddles_span",)


def test_a_token_of_white_space_only_is_supervised_under_trimmed_offsets(tmp_path: Path) -> None:
    tokenizer = merging_tokenizer(tmp_path / "t", CHATML, (), post_processor=processors.ByteLevel(trim_offsets=True))
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", " x  y ")}, strict=True)
    assert supervised_texts(tokenizer, sample) == [" x  y <|im_end|>"]


def test_an_end_mark_that_swallows_its_newline_is_supervised(tmp_path: Path) -> None:
    special = ("<|im_start|>", AddedToken("<|im_end|>", rstrip=True, special=True))
    tokenizer = merging_tokenizer(tmp_path / "t", CHATML, (), special=special)

    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "yo", "b", "zu")})

    assert supervised_texts(tokenizer, sample) == ["yo<|im_end|>", "zu<|im_end|>"]
    assert sample.warnings == ()


def test_a_token_that_merges_an_answer_with_the_next_header_is_not_supervised(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
    tokenizer = merging_tokenizer(tmp_path / "t", template, merges=(("o", "u"),))

    sample = sample_of(tmp_path, tokenizer, {"messages": turns("1", "yo", "2", "zu")})

    assert supervised_texts(tokenizer, sample) == ["y", "zu"]
    assert sample.warnings == ("token_straddles_span",)


def test_a_character_of_several_tokens_is_supervised_whole(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", CHATML)
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("é😀", "😀é", "ü", "日本")}, strict=True)
    assert supervised_texts(tokenizer, sample) == ["😀é<|im_end|>", "日本<|im_end|>"]
    assert sample.loss_mask.sum() == 6 + 1 + 6 + 1


def words(folder: Path, template: str, normalizer=None, vocabulary: str = "yo hi user assistant") -> str:
    ids = {word: place for place, word in enumerate(["<|im_start|>", "<|im_end|>", "<unk>", *vocabulary.split()])}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.normalizer = normalizer
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return save(folder, backend, template, unk_token="<unk>")


def test_a_tokenizer_of_words_gets_one_mark_per_word(tmp_path: Path) -> None:
    tokenizer = words(tmp_path / "t", CHATML)
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("hi", "yo yo")})
    # <|im_start|> user hi <|im_end|> <|im_start|> assistant yo yo <|im_end|>
    assert sample.input_ids.tolist() == [0, 5, 4, 1, 0, 6, 3, 3, 1]
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Lowercase(),
        normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]),
    ],
    ids=["lower", "accents"],
)
def test_a_tokenizer_that_normalises_marks_the_tokens_of_the_rendered_characters(tmp_path: Path, normalizer) -> None:
    tokenizer = words(tmp_path / "t", CHATML, normalizer)
    answer = "Yö YO" if isinstance(normalizer, normalizers.Sequence) else "Yo YO"

    sample = sample_of(tmp_path, tokenizer, {"messages": turns("HI", answer)}, strict=True)

    assert sample.input_ids.tolist() == [0, 5, 4, 1, 0, 6, 3, 3, 1]
    assert sample.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]


def sentencepiece_like(folder: Path, prepend: str) -> str:
    letters = [*"▁abcdefghijklmnopqrstuvwxyz:\n", "▁y", "▁yo"]
    vocabulary = {token: place for place, token in enumerate(["<s>", "</s>", "<unk>", *letters])}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "y"), ("▁y", "o")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prepend, split=False)
    backend.decoder = decoders.Metaspace("▁", prepend_scheme=prepend, split=False)
    backend.add_special_tokens(["<s>", "</s>"])
    template = (
        "{% for m in messages %}{{ '<s>' + m.role + '\n' if m.role == 'user' else '</s>' }}"
        "{{ m.content + '</s>' }}{% endfor %}"
    )
    return save(folder, backend, template, unk_token="<unk>", eos_token="</s>")


def test_a_space_that_the_tokenizer_prepends_to_an_answer_is_part_of_its_first_token(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path / "t", "always")
    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "yo b")})
    tokens = AutoTokenizer.from_pretrained(tokenizer).convert_ids_to_tokens(sample.input_ids.tolist())
    marked = [token for token, mark in zip(tokens, sample.loss_mask, strict=True) if mark]
    assert marked == ["▁yo", "▁", "b", "</s>"]


PYTHON_TOKENIZER = '''
from transformers import PreTrainedTokenizer

class {name}(PreTrainedTokenizer):
    """One token per UTF-8 byte, spelled in GPT-2's alphabet or as `<byte>`."""

    def __init__(self, **kwargs):
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in shown]
        self.letters = {{byte: chr(byte) for byte in shown}} | {{byte: chr(256 + k) for k, byte in enumerate(hidden)}}
        if {opaque}:
            self.letters = {{byte: f"<{{byte}}>" for byte in range(256)}}
        self.table = {{letter: byte for byte, letter in self.letters.items()}}
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {{**self.table, **self.added_tokens_encoder}}

    def _tokenize(self, text, **kwargs):
        return [self.letters[byte] for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return self.table[token]

    def _convert_id_to_token(self, index):
        return self.letters[index]

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()
'''


def python_tokenizer(folder: Path, opaque: bool) -> str:
    folder.mkdir()
    name = "OpaqueBytes" if opaque else "PlainBytes"
    (folder / "tokenization_bytes.py").write_text(PYTHON_TOKENIZER.format(name=name, opaque=opaque))
    special = {
        str(256 + place): {"content": token, "special": True, "lstrip": False, "rstrip": False, "normalized": False}
        for place, token in enumerate(["<|im_start|>", "<|im_end|>"])
    }
    config = {
        "tokenizer_class": name,
        "auto_map": {"AutoTokenizer": [f"tokenization_bytes.{name}", None]},
        "added_tokens_decoder": special,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return str(folder)


def test_a_tokenizer_in_python_that_spells_bytes_gets_the_same_mask_as_a_fast_one(tmp_path: Path) -> None:
    row = {"messages": turns("é\n<|im_end|>", "yo 😀\n", "b", "", "c")}

    slow = sample_of(tmp_path, python_tokenizer(tmp_path / "slow", opaque=False), row, trust_remote_code=True)

    fast = sample_of(tmp_path, byte_tokenizer(tmp_path / "fast", CHATML), row)
    assert slow.loss_mask.tolist() == fast.loss_mask.tolist()
    assert slow.loss_mask.sum() == len("yo ") + 4 + len("\n") + 1 + 1


def test_a_tokenizer_in_python_that_tells_no_characters_is_refused_and_supervises_all_on_request(
    tmp_path: Path,
) -> None:
    tokenizer = python_tokenizer(tmp_path / "t", opaque=True)
    row = {"messages": turns("a", "yo")}
    with pytest.raises(UsageError, match=r"use its fast version, or supervise everything \(--loss-on all\)"):
        tokenise_rows(tmp_path, tokenizer, row, trust_remote_code=True)
    assert sample_of(tmp_path, tokenizer, row, trust_remote_code=True, loss_on="all").loss_mask.all()


def test_remote_code_is_not_run_without_leave(tmp_path: Path) -> None:
    tokenizer = python_tokenizer(tmp_path / "t", opaque=False)
    with pytest.raises(UsageError, match="it cannot be loaded"):
        tokenise_rows(tmp_path, tokenizer, {"messages": turns("a", "yo")})


def test_a_begin_token_is_never_put_before_a_conversation_that_renders_its_own(tmp_path: Path) -> None:
    step = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    template = "{{ bos_token }}" + CHATML
    tokenizer = merging_tokenizer(tmp_path / "t", template, (), ("<s>", "<|im_end|>", "<|im_start|>"), step)

    sample = sample_of(tmp_path, tokenizer, {"messages": turns("a", "yo")})

    assert sample.input_ids.tolist()[:2] == [0, 2]
    assert supervised_texts(tokenizer, sample) == ["yo<|im_end|>"]


def test_a_text_row_gets_the_tokenizers_own_begin_token_and_is_supervised_throughout(tmp_path: Path) -> None:
    step = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = merging_tokenizer(tmp_path / "t", None, (), ("<s>", "</s>"), step)

    sample = sample_of(tmp_path, tokenizer, {"text": "ab"})

    assert supervised_texts(tokenizer, sample) == ["<s>ab"]
    assert sample.loss_mask.tolist() == [1, 1, 1]
    assert sample.mask_rule == "all"


def test_an_answer_merged_into_its_header_leaves_a_row_without_supervision(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    tokenizer = merging_tokenizer(tmp_path / "t", template, merges=(("t", "x"),))
    assert reject_of(tmp_path, tokenizer, {"messages": turns("a", "x")}).code == "unsupervised"


def test_a_text_row_that_brings_its_own_begin_token_is_counted(tmp_path: Path) -> None:
    step = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = merging_tokenizer(tmp_path / "t", None, (), ("<s>", "</s>"), step)
    assert sample_of(tmp_path, tokenizer, {"text": "<s>ab"}).warnings == ("begin_token_twice",)
