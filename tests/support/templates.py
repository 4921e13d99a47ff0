"""Small tokenizers and chat templates for the tests of input rows.

`byte_tokenizer` keeps one token per byte, so a mask over tokens is a mask over ASCII characters; `merging_tokenizer`
merges what it is told to, so a token can lie across an edge.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}" + CHATML
)
# An EOS after the last assistant turn only; turns are told apart by plain words.
EOS_AT_END = (
    "{% for m in messages %}{{ ('Q: ' if m.role == 'user' else 'A: ') + m.content }}"
    "{% if loop.last and m.role == 'assistant' %}{{ '</s>' }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)
# Drops the thinking of earlier turns, writes a think block into the last one, empty where the row has none.
REWRITING = (
    "{% for m in messages %}{% set text = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' and '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ text + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
CLOCK = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\\n' }}" + CHATML
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}"
    "{% endif %}{{ '\\n' }}{% endfor %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role }}"
    "{% if m.content %}{{ '\\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + call.function.name + ' ' }}"
    "{{ call.function.arguments | tojson + '\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "</s>")


def byte_tokenizer(folder: Path, template: str | None = CHATML, special: tuple[str, ...] = SPECIAL) -> str:
    """A folder with a tokenizer of one token per byte and one per special text; ids: special first, then bytes."""
    return merging_tokenizer(folder, template, merges=(), special=special)


def merging_tokenizer(
    folder: Path,
    template: str | None,
    merges: tuple[tuple[str, str], ...],
    special: tuple[str | AddedToken, ...] = SPECIAL,
    post_processor: processors.PostProcessor | None = None,
) -> str:
    """As `byte_tokenizer`, with byte-level merges, written in the byte alphabet: a newline is `Ċ`, a space `Ġ`."""
    vocabulary = {str(token): place for place, token in enumerate(special)}
    for token in (*sorted(pre_tokenizers.ByteLevel.alphabet()), *(first + second for first, second in merges)):
        vocabulary[token] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if post_processor is not None:
        backend.post_processor = post_processor
    backend.add_special_tokens(
        [AddedToken(token, special=True) if isinstance(token, str) else token for token in special]
    )
    return save(folder, backend, template, bos_token=str(special[0]), eos_token=str(special[1]))


def save(folder: Path, backend: Tokenizer, template: str | None, **special_tokens: str) -> str:
    """Writes a backend as a folder that AutoTokenizer reads; returns the folder's path."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special_tokens)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)
