"""Checkpoints on disk (PEFT layout) and the catalogue that says what exists."""
