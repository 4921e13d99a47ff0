"""Input rows as prompts."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..data.conversation import Conversation
from ..data.raw_row import RawRow
from ..data.row_error import RowError
from ..data.row_json import parse_object
from ..data.schema import read_body, read_id
from ..store import Reject
from .prompts import Prompt, PromptMaker, answered


@dataclass
class DatasetPrompts:
    """The rows of a data set: those that became prompts, and those that did not.

    answers_dropped: conversations that ended with the assistant's turn, which the model writes anew.
    """

    prompts: list[Prompt] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    answers_dropped: int = 0


def dataset_prompts(
    rows: Iterable[RawRow], maker: PromptMaker, fault_of: Callable[[Prompt], str | None]
) -> DatasetPrompts:
    """Read every row: `messages` (or `conversations`), `text` or `input_ids`.

    fault_of: why the model cannot take a prompt, or `None`.
    """
    found = DatasetPrompts()
    for row in rows:
        sample_id = None
        try:
            values = parse_object(row.payload) if isinstance(row.payload, bytes) else row.payload
            sample_id = read_id(values, row.source, row.line)
            body = read_body(values)
            prompt = Prompt(maker.token_ids(body), sample_id, row.source, row.line)
            fault = fault_of(prompt)
            if fault is not None:
                raise RowError("bad_prompt", fault)
        except RowError as error:
            found.rejects.append(Reject(row.source, row.line, sample_id, error.reason, {"code": error.code}))
            continue
        found.prompts.append(prompt)
        found.answers_dropped += isinstance(body, Conversation) and answered(body)
    return found
