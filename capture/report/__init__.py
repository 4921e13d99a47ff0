"""Figures of a captured folder, and in plain words what is unusual about it."""

from .survey import Survey, survey
from .verdict import Notice, notices
from .writing import Report, write_report

__all__ = ["Notice", "Report", "Survey", "notices", "survey", "write_report"]
