"""Tests share two cores and never reach a network: small thread pools, no model hub, no telemetry."""

from __future__ import annotations

import os

for name, value in {
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TINKER_TELEMETRY": "0",
}.items():
    os.environ.setdefault(name, value)
