"""Processes that an agent runs: how they end (spec) and what they print (logs)."""
