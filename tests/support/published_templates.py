"""Chat templates in the shapes that model families publish, in words of their own, with the tokens that mark their turns."""

from support.templates import CHATML

QWEN25 = (
    "{% if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if not (loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# An empty thinking block in the last answer only.
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ '<s>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# A system text goes ahead of the first question.
GEMMA = (
    "{{ '<s>' }}{% set head = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if head else messages) %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (head if loop.first else '')"
    " + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
DEEPSEEK_V3 = (
    "{{ '<s>' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|Assistant|>' + m.content + '</s>' }}"
    "{% elif m.role == 'user' %}{{ '<|User|>' + m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"
)
KIMI_K2 = (
    "{% for m in messages %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else '' }}"
)
GRANITE3 = (
    "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
PUBLISHED = {
    "Qwen2.5": QWEN25, "Qwen3": QWEN3, "Llama 3": LLAMA3, "Gemma": GEMMA, "DeepSeek-V3": DEEPSEEK_V3, "Kimi K2": KIMI_K2,
    "Phi-3": PHI3, "Granite 3": GRANITE3, "SmolLM2": CHATML,
}  # fmt: skip
MARKS = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
    "<end_of_turn>", "<|Assistant|>", "<|User|>", "<|start|>", "<|message|>", "<|end|>", "<|return|>", "<|im_user|>",
    "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|user|>", "<|assistant|>", "<|system|>", "<|start_of_role|>",
    "<|end_of_role|>", "<|end_of_text|>",
)  # fmt: skip
