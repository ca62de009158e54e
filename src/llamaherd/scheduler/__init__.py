"""Continuous batching; pure planning, one effectful step."""
