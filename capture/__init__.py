"""What happens to captured values: outputs, sampling, data, runs and the files they end in."""
