"""Options in groups: one heading of the help each, and one group of settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import click

from ...models.choices import dtype_name


@dataclass(frozen=True)
class OptionGroup:
    """Options that belong together.

    Attributes:
        title: the heading that help shows them under; groups of one title share it.
        options: named, by their parameters, as the fields of the settings that they fill.
    """

    title: str
    options: tuple[click.Option, ...]


class GroupedCommand(click.Command):
    """A command whose help shows its options under the headings of their groups."""

    groups: tuple[OptionGroup, ...] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section a heading; what belongs to no group comes last."""
        title_of = {id(option): group.title for group in self.groups for option in group.options}
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(title_of.get(id(param), "Other"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class DtypeChoice(click.Choice[str]):
    """A choice of dtypes that takes short names (bf16) too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(dtype_name(value), param, ctx)


def grouped(*groups: OptionGroup) -> Callable[[Callable[..., Any]], GroupedCommand]:
    """Return the decorator that makes a command with the options of `groups`."""

    def decorate(function: Callable[..., Any]) -> GroupedCommand:
        options: list[click.Parameter] = [option for group in groups for option in group.options]
        command = click.command(cls=GroupedCommand, params=options)(function)
        command.groups = groups
        return command

    return decorate


def choice(words: Any) -> click.Choice[str]:
    """Return the choice between the words of a Literal type."""
    return click.Choice(get_args(words))


def option(*names: str, **settings: Any) -> click.Option:
    """Return one option; the first name without dashes, if any, is the field that it fills."""
    return click.Option(names, **settings)


def values(given: Mapping[str, Any], *groups: OptionGroup) -> dict[str, Any]:
    """Return what was given for the options of `groups`, by the names of the settings' fields."""
    names = [option.name for group in groups for option in group.options]
    return {name: given[name] for name in names if name is not None}
