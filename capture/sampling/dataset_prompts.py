"""Input rows as prompts."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..data.chat.conversation import Conversation
from ..data.encoder import record_deadline, record_fields
from ..data.errors import RecordError
from ..data.records.items import RawRecord
from ..data.schema import read_body, read_id
from ..store import Reject
from .generation.prompts import Prompt, PromptMaker, answered


@dataclass
class DatasetPrompts:
    """The rows of a data set: those that became prompts, and those that did not.

    unread: fields that nothing read, counted by name.
    answers_dropped: conversations that ended with the assistant's turn, which the model writes anew.
    """

    prompts: list[Prompt] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    answers_dropped: int = 0
    unread: Counter[str] = field(default_factory=Counter)


def dataset_prompts(
    rows: Iterable[RawRecord], maker: PromptMaker, fault_of: Callable[[Prompt], str | None]
) -> DatasetPrompts:
    """Read every record, in any form that a capture reads; marks and masks say nothing of a prompt.

    fault_of: why the model cannot take a prompt, or `None`.
    """
    found = DatasetPrompts()
    for row in rows:
        sample_id = None
        try:
            fields = record_fields(row)
            sample_id = read_id(fields, row.source, row.line)
            body = read_body(fields)
            use = fields.use()
            use.require_harmless(strict=False)
            found.unread.update(use.unread)
            with record_deadline():
                prompt = Prompt(maker.token_ids(body), sample_id, row.source, row.line)
            fault = fault_of(prompt)
            if fault is not None:
                raise RecordError("bad_prompt", fault)
        except RecordError as error:
            found.rejects.append(Reject.of(row.source, row.line, sample_id, error.reason, error.code))
            continue
        found.prompts.append(prompt)
        found.answers_dropped += isinstance(body, Conversation) and answered(body)
    return found
