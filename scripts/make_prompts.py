#!/usr/bin/env python3
"""Makes prompts to generate training data from, and others, on topics that no training prompt touches, to measure with.

    python scripts/make_prompts.py --train train.jsonl --held-out held-out.jsonl [--conversations F] [--held-out-topics 10]

A prompt is one template filled with one topic. The split is by topic: all prompts of a held-out topic are held out. With
--conversations, the opening turns of its rows are training prompts too.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

TOPICS = (
    "running", "photosynthesis", "lighthouses", "Lisbon", "SQL databases", "square roots", "shell scripts", "pirate ships",
    "sourdough bread", "volcanoes", "the moon", "bicycles", "honey bees", "chess", "coral reefs", "rainbows", "glaciers",
    "violins", "tea", "coffee", "spiders", "whales", "earthquakes", "electric cars", "wind turbines", "solar panels",
    "vaccines", "antibiotics", "the human heart", "sleep", "dreams", "memory", "black holes", "comets", "Mars", "Saturn",
    "gravity", "magnets", "lightning", "clouds", "tides", "deserts", "rainforests", "the Arctic", "penguins", "elephants",
    "wolves", "cats", "dogs", "horses", "butterflies", "dinosaurs", "fossils", "diamonds", "gold", "iron", "glass", "paper",
    "printing", "the telephone", "radio", "television", "the internet", "computers", "robots", "encryption", "algorithms",
    "probability", "prime numbers", "geometry", "calculus", "statistics", "economics", "inflation", "banks", "taxes",
    "democracy", "the Roman Empire", "ancient Egypt", "the Renaissance", "the Silk Road", "railways", "bridges", "castles",
    "gardens", "roses", "tomatoes", "potatoes", "rice", "cheese", "chocolate", "soup", "pasta", "swimming", "football",
    "tennis", "yoga", "meditation", "poetry", "novels", "theatre", "jazz", "opera", "photography", "painting", "pottery",
    "knitting", "camping", "hiking", "sailing",
)  # fmt: skip
TEMPLATES = (
    "Explain {} in simple terms.",
    "What should a beginner know about {}?",
    "Write a short paragraph about {}.",
    "Give me three interesting facts about {}.",
    "Why does {} matter?",
    "What are common misunderstandings about {}?",
    "Tell a child about {}.",
    "List five questions a teacher could ask about {}.",
    "Describe the history of {} briefly.",
    "How could I learn more about {}?",
)


@click.command()
@click.option("--train", type=click.Path(path_type=Path), required=True, help="Training prompts to write.")
@click.option("--held-out", type=click.Path(path_type=Path), required=True, help="Held-out prompts to write.")
@click.option("--held-out-topics", default=10, show_default=True, type=click.IntRange(1, len(TOPICS) - 1))
@click.option(
    "--conversations", type=click.Path(exists=True, path_type=Path), help="JSONL whose opening turns train too."
)
@click.option("--seed", default=0, show_default=True, help="Which topics are held out.")
def main(train: Path, held_out: Path, held_out_topics: int, conversations: Path | None, seed: int) -> None:
    """Write the two files and say how many prompts each holds."""
    chosen = set(random.Random(seed).sample(TOPICS, held_out_topics))
    rows = list(filled([topic for topic in TOPICS if topic not in chosen]))
    if conversations is not None:
        rows += opening_turns(conversations)
    write(train, rows)
    write(held_out, list(filled([topic for topic in TOPICS if topic in chosen])))
    click.echo(f"held out: {', '.join(topic for topic in TOPICS if topic in chosen)}")


def filled(topics: list[str]) -> Iterator[dict[str, Any]]:
    """Every template with every topic, as rows."""
    for topic in topics:
        for number, template in enumerate(TEMPLATES):
            yield row(f"{topic}/{number}", [{"role": "user", "content": template.format(topic)}])


def opening_turns(path: Path) -> list[dict[str, Any]]:
    """What each conversation begins with, up to its first user turn."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")):
        if line.strip():
            conversation = json.loads(line)
            turns = [plain_turn(turn) for turn in conversation.get("messages") or conversation.get("conversations")]
            first = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
            if first is not None and all(isinstance(turn["content"], str) for turn in turns[: first + 1]):
                rows.append(row(f"conversation/{number}", turns[: first + 1]))
    return rows


def plain_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """A turn of either common schema as role and content."""
    role = turn.get("role") or turn.get("from")
    return {"role": "user" if role in ("human", "user") else role, "content": turn.get("content") or turn.get("value")}


def row(name: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": name, "messages": messages}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    click.echo(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
