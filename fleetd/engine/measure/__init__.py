"""What this machine measures of itself and of a model: seconds and bytes."""
