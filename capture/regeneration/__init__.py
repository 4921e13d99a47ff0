"""Answers first, rows afterwards: turns of a data set written anew by an engine, then captured by a plain forward."""

from .run import regenerate_dataset
from .summary import RegenerationSummary

__all__ = ["RegenerationSummary", "regenerate_dataset"]
