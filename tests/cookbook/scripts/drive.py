"""Run cookbook recipes one after the other, each as ``python -m MODULE ARGUMENTS`` would be: reads ``[[module, argument…], …]`` as JSON
from standard input. One process, because importing the cookbook takes longer than a tiny run."""

from __future__ import annotations

import json
import runpy
import sys
import time

for module, *arguments in json.load(sys.stdin):
    sys.argv = [module, *arguments]
    print(f"== {module} {' '.join(arguments)}", file=sys.stderr, flush=True)
    begun = time.monotonic()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    print(f"== {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
