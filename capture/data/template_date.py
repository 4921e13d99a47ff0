"""The date a chat template reads: fixed for the run, never the clock."""

import datetime
import json

_DIRECTIVES = "aAbBcCdDeFgGhHIjklmMnpPrRStTuUVwWxXyYzZ"


def with_fixed_date(template: str, date: datetime.date) -> str:
    """The template, with `strftime_now` answering for midnight of `date` instead of reading the clock.

    A template that never names it comes back unchanged. transformers turns callables among the template's arguments
    into placeholder text, so the function is a macro ahead of the template; the newline between the two is trimmed
    like any first newline after a block, so nothing else of the rendering moves.
    """
    if "strftime_now" not in template:
        return template
    return f"{{% macro strftime_now(format) %}}{{{{ format{_replacements(date)} }}}}{{% endmacro %}}\n{template}"


def _replacements(date: datetime.date) -> str:
    moment = datetime.datetime.combine(date, datetime.time())
    directives = [f"%{flag}{letter}" for flag in ("", "-") for letter in _DIRECTIVES]
    # An escaped percent must not start a directive: it waits as a NUL until all directives are replaced.
    pairs = [("%%", "\0"), *((directive, moment.strftime(directive)) for directive in directives), ("\0", "%")]
    return "".join(f"|replace({json.dumps(old)}, {json.dumps(new)})" for old, new in pairs)
