"""Capture as an ability of a model class: `HiddenStateCaptureMixin`, and `with_capture` for a model that already exists."""

from .mixin import HiddenStateCaptureMixin, with_capture, without_capture

__all__ = ["HiddenStateCaptureMixin", "with_capture", "without_capture"]
