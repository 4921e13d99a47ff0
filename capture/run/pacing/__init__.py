"""Batch sizes: learned from the run's own forwards, within the device's memory."""
