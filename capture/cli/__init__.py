"""The command `hiddentap`."""

from .main import main

__all__ = ["main"]
