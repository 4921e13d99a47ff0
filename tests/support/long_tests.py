"""Tests that take many minutes, and run only where they are asked for."""

import os

import pytest

takes_many_minutes = pytest.mark.skipif(
    os.environ.get("HIDDENTAP_LONG_TESTS") != "1", reason="takes many minutes: HIDDENTAP_LONG_TESTS=1 runs it"
)
