"""The end-of-turn mark: what the template writes after an assistant's turn for the model to stop on."""

import re

from ..chat.conversation import TOOL_CALL_FIELDS, Message, content_like, with_texts
from ..chat.rendering import Rendering
from ..chat.template import ChatTemplate
from ..chat.text_diff import atoms, common_atoms
from ..errors import RecordError

_KEPT_GAPS = 4096
_FIRST_RUN = re.compile(r"\s*\S+")


class TurnEnds:
    """Finds how far a turn reaches past its content: tool calls and the end-of-turn mark, no white space after it."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._of_gap: dict[tuple[bool, str], int] = {}

    def length_in_gap(self, rendering: Rendering, place: int, gap: str) -> int:
        """Return `length` where `gap` is all that the template writes before the next text of the row.

        The same gap ends the same way, so it is looked up after the first time: a rendering per turn would make the
        cost of a conversation quadratic in its turns.
        """
        key = (place == len(rendering.conversation.messages) - 1, gap)
        if key not in self._of_gap:
            if len(self._of_gap) >= _KEPT_GAPS:
                self._of_gap.clear()
            self._of_gap[key] = self.length(rendering, place, gap)
        return self._of_gap[key]

    def length(self, rendering: Rendering, place: int, tail: str) -> int:
        """Return how many characters of `tail`, the rendering after the content of message `place`, belong to its turn.

        A turn inside the conversation shares them with the same turn as the last one; the last turn shares them with
        itself before another message. What follows them (the next header, an EOS of the whole text) is not shared.
        """
        final = place == len(rendering.conversation.messages) - 1
        reference = self._tail_elsewhere(rendering, place, final)
        shared = self._shared(tail, reference) if reference is not None else 0
        if shared:
            return shared
        return self._last_run(rendering.conversation.messages[place], tail) if final else self._mark_before_header(tail)

    def _tail_elsewhere(self, rendering: Rendering, place: int, final: bool) -> str | None:
        conversation, markers = rendering.conversation, rendering.markers
        turn = with_texts(conversation.messages[place], content=markers.content(place))
        next_turn = {"role": "user", "content": content_like(conversation.messages[place], markers.content(place + 1))}
        following: list[Message] = [next_turn] if final else []
        try:
            text = self._template.render([*conversation.messages[:place], turn, *following], conversation.tools)
        except RecordError:
            return None
        _, found, tail = text.rpartition(markers.content(place))
        return tail if found else None

    def _shared(self, tail: str, reference: str) -> int:
        # A content that is absent in the row and a marker in the reference may differ in the white space after it.
        text = tail.lstrip()
        shared = text[: common_atoms(text[: len(reference) + 64], reference.lstrip(), self._template.added_tokens)]
        return len(tail) - len(text) + len(shared.rstrip()) if shared.strip() else 0

    def _last_run(self, message: Message, tail: str) -> int:
        """Return a mark that only the end of the text has, such as an EOS."""
        if any(message.get(field) for field in TOOL_CALL_FIELDS):
            return len(tail.rstrip())
        run = _FIRST_RUN.match(tail)
        return run.end() if run else 0

    def _mark_before_header(self, tail: str) -> int:
        """Return a mark that the last turn spells differently: an added token right before the opening of the next header."""
        added = self._template.added_tokens
        pieces = [piece for piece in atoms(tail[:256], added) if piece.strip()]
        opening = next((piece for piece in atoms(self._template.generation_prompt(), added) if piece.strip()), None)
        if len(pieces) < 2 or pieces[0] not in added or pieces[0] == opening or pieces[1] != opening:
            return 0
        return len(tail) - len(tail.lstrip()) + len(pieces[0])
