"""Keeps the model library's own bars and hints off the screen: what matters of them the command says itself."""

from __future__ import annotations


def quiet_libraries() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
