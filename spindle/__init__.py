"""Spindle: a LoRA training engine inside one Python process."""
