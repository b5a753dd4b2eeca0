"""A trainer and a frontend in two processes of this machine, with sockets in the place of Modal's calls.

``python -m tests.modal.loopback trainer PORT STORE`` and ``… frontend PORT TRAINER_PORT LOG LATENCY_S``. A call is one connection: the
length of the frame in eight bytes, the frame, and back the same way. The frontend writes a line of JSON for every call it makes.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

KEY = "tml-loopback-key"
NAME = "spindle/tiny"


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(8)))


async def write_frame(writer: asyncio.StreamWriter, frame: bytes) -> None:
    writer.write(len(frame).to_bytes(8) + frame)
    await writer.drain()


class LoopbackTransport:
    """latency_s: added to every hop, each way."""

    def __init__(self, port: int, log: str, latency_s: float) -> None:
        self.port, self.latency_s = port, latency_s
        self.log = open(log, "a", buffering=1)  # noqa: SIM115 (for the life of the process)

    async def call(self, request):
        import msgspec

        from spindle.modal.wire import WireResponse, encode

        frame = encode(request)
        began = time.monotonic()
        await asyncio.sleep(self.latency_s)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            await write_frame(writer, frame)
            answer = await read_frame(reader)
        finally:
            writer.close()
        await asyncio.sleep(self.latency_s)
        line = {"path": request.path, "body": len(request.body), "frame": len(frame), "seconds": time.monotonic() - began}
        self.log.write(json.dumps(line) + "\n")
        return msgspec.msgpack.decode(answer, type=WireResponse)


def run_frontend(port: int, trainer_port: int, log: str, latency_s: float) -> None:
    import uvicorn

    from spindle.modal.frontend import Frontend

    frontend = Frontend([LoopbackTransport(trainer_port, log, latency_s)])
    uvicorn.run(frontend, port=port, log_level="warning", access_log=False, ws="none")


def run_trainer(port: int, store: str) -> None:
    from spindle.compute.model import BaseModel
    from spindle.engine import Engine
    from spindle.modal.trainer import Trainer
    from spindle.modal.wire import decode_request, encode
    from tests.tiny import tiny_llama

    async def main() -> None:
        trainer = Trainer(lambda: Engine(BaseModel.load(tiny_llama()), name=NAME), store, [KEY])
        await trainer.start()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await write_frame(writer, encode(await trainer.call(decode_request(await read_frame(reader)))))
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(main())


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        run_trainer(int(sys.argv[2]), sys.argv[3])
    else:
        run_frontend(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
