"""The help of each command: every option explained, in the same groups."""

import re

import click
import pytest

from hiddentap.capture.cli.main import hiddentap

HEADINGS = ["Model", "Layers", "Input", "Sampling", "Output", "Speed", "Engine", "Other"]


def options_of(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option)]


@pytest.mark.parametrize("name", sorted(hiddentap.commands))
def test_every_option_is_explained(name: str) -> None:
    assert [option.opts for option in options_of(hiddentap.commands[name]) if not option.help] == []


LONG = sorted(name for name, command in hiddentap.commands.items() if len(options_of(command)) > 15)


def test_the_long_commands_are_these() -> None:
    assert {"capture", "generate", "audit"} <= set(LONG)


@pytest.mark.parametrize("name", LONG)
def test_a_command_of_more_than_fifteen_options_shows_them_in_groups(run, name: str) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0
    headings = re.findall(r"^(\w+):$", out, re.MULTILINE)
    assert headings == [heading for heading in HEADINGS if heading in headings]
    assert len(headings) >= 4
    sections = dict(re.findall(r"^(\w+):\n((?:  .*\n|\n)+)", out, re.MULTILINE))
    listed = [
        option for section in sections.values() for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", section, re.M)
    ]
    asked = [option.opts[0] for option in options_of(hiddentap.commands[name])]
    assert sorted(listed) == sorted([*asked, "--help"])
    assert "--data" not in sections["Output"]


def test_the_groups_of_a_capture_hold_what_they_say(run) -> None:
    out = run("capture", "--help")[1]
    sections = dict(re.findall(r"^(\w+):\n((?:  .*\n|\n)+)", out, re.MULTILINE))
    for heading, option in {
        "Model": "--device-map", "Layers": "--draft-config", "Input": "--loss-on", "Output": "--store-dtype",
        "Speed": "--exact", "Engine": "--ray-address", "Other": "--json",
    }.items():  # fmt: skip
        assert option in sections[heading]
