"""The spans that a template marks with `{% generation %}`."""

import re
from collections.abc import Sequence

from ..chat.conversation import Message
from ..chat.rendering import Rendering
from ..chat.template import ChatTemplate
from ..chat.text_diff import Span
from ..errors import RecordError

_OPENING = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_CLOSING = re.compile(r"\{%[-+]?\s*endgeneration\s*[-+]?%\}")


def has_marks(source: str) -> bool:
    """Return whether a template's text marks what the assistant writes."""
    return _OPENING.search(source) is not None


def marked_spans(template: ChatTemplate, rendering: Rendering) -> Sequence[tuple[int | None, Span]]:
    """Characters of the full rendering inside the template's marks, checked against what the marked blocks print.

    Each comes with the place of the message that it renders, None where that cannot be told.

    transformers counts the characters printed before a block, which misses those of a Jinja macro or `set` block around
    it: the spans then lie over other text. Printing a word at both ends of each block shows what it really holds.
    Raises RecordError where the two differ or a block holds text of another role.
    """
    conversation, markers = rendering.conversation, rendering.markers
    text, spans = template.render_with_marks(conversation.messages, conversation.tools)
    blocks = _blocks(template, rendering, conversation.messages)
    # White space at a block's ends can be trimmed by the tag itself and not by a word in its place.
    if text != rendering.text or [text[start:end].strip() for start, end in spans] != [
        block.strip() for block in blocks
    ]:
        raise _misplaced("they lie over other text; marks inside a Jinja macro or set block do")
    probe = markers.in_place_of_all(conversation.messages)
    probed = _blocks(template, rendering, probe)
    places = [{number // 2 for number, _ in markers.found(block)} for block in probed]
    for place in sorted(set().union(*places)):
        role = conversation.messages[place]["role"]
        if role != "assistant":
            raise _misplaced(f"they cover message {place}, of role {role}")
    if len(places) != len(spans):
        return [(None, span) for span in spans]
    return [(found.pop() if len(found) == 1 else None, span) for found, span in zip(places, spans, strict=True)]


def _blocks(template: ChatTemplate, rendering: Rendering, messages: Sequence[Message]) -> list[str]:
    """Return the text of each marked block that is not empty."""
    tools, markers = rendering.conversation.tools, rendering.markers
    source = template.source(tools)
    source = _OPENING.sub(lambda tag: f"{tag[0]}{{{{ '{markers.opening}' }}}}", source)
    source = _CLOSING.sub(lambda tag: f"{{{{ '{markers.closing}' }}}}{tag[0]}", source)
    text = template.render(messages, tools, source=source)
    blocks = re.findall(f"{markers.opening}(.*?){markers.closing}", text, re.DOTALL)
    return [block for block in blocks if block]


def _misplaced(found: str) -> RecordError:
    return RecordError(
        "marks_misplaced",
        f"expected the template's generation marks to cover what the assistant writes; found that {found}; "
        f"mend the template, or supervise everything (--loss-on all)",
    )
