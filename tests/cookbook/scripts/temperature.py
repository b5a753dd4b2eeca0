"""Samples at several temperatures through the cookbook's completer: prints prompt, tokens and the logprobs that came with them."""

from __future__ import annotations

import asyncio
import json

import tinker
from tinker_cookbook import renderers
from tinker_cookbook.completers import TinkerTokenCompleter
from tinker_cookbook.tokenizer_utils import get_tokenizer

MODEL = "Qwen/Qwen3.5-4B"


async def main() -> list[dict]:
    renderer = renderers.get_renderer("qwen3_5_disable_thinking", get_tokenizer(MODEL))
    sampler = await tinker.ServiceClient().create_sampling_client(base_model=MODEL)
    prompt = renderer.build_generation_prompt([{"role": "user", "content": "Say anything."}])

    async def one(temperature: float) -> dict:
        sampled = await TinkerTokenCompleter(sampler, max_tokens=24, temperature=temperature)(prompt, [])
        scored = await sampler.compute_logprobs(prompt.append(tinker.EncodedTextChunk(tokens=sampled.tokens)))
        told = {"temperature": temperature, "prompt": prompt.to_ints(), "tokens": list(sampled.tokens)}
        return told | {"logprobs": list(sampled.logprobs), "scored": list(scored[prompt.length :])}

    return await asyncio.gather(*(one(temperature) for temperature in (0.0, 0.3, 0.7, 1.0, 1.7)))


print(json.dumps(asyncio.run(main())))
