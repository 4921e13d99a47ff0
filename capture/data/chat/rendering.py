"""One conversation rendered."""

from dataclasses import dataclass

from ..errors import RecordError
from .conversation import Conversation
from .markers import Markers, markers_for
from .template import ChatTemplate


@dataclass(frozen=True)
class Rendering:
    """`text`: the full rendering that the token ids are made of. `marked`: the rendering with a marker in place of
    every text of the row, None where the template refused that. `markers` occur nowhere in the row."""

    conversation: Conversation
    text: str
    marked: str | None
    markers: Markers


def render_conversation(template: ChatTemplate, conversation: Conversation) -> Rendering:
    """Renders a conversation in full and with markers. Raises RecordError where the template refuses it."""
    text = template.render(conversation.messages, conversation.tools)
    markers = markers_for(conversation.messages, text)
    try:
        marked = template.render(markers.in_place_of_all(conversation.messages), conversation.tools)
    except RecordError:
        # Some templates look into the texts; then each turn is looked for alone.
        marked = None
    return Rendering(conversation, text, marked, markers)
