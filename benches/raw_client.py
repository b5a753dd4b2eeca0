"""A client in a process of its own that costs next to nothing: whole requests in bytes, one socket, one clock.

``python benches/raw_client.py HOST PORT`` reads JSON lines ``["train", base64] | ["step", base64]`` from standard input, each a whole HTTP
request; sends one after the other, waits for each answer by one long poll, and prints one JSON list of [kind, sent_s, answered_s] on
``time.perf_counter``'s clock, which all processes of a Linux machine share.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import sys
import time


class Connection:
    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.socket = socket.create_connection((host, port), 60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def exchange(self, request: bytes) -> bytes:
        """Send one HTTP request, return the body of its answer."""
        self.socket.sendall(request)
        answer = self.socket.recv(1 << 20)
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += self.socket.recv(1 << 20)
        head, body = answer[:end], answer[end + 4 :]
        assert head.startswith(b"HTTP/1.1 200"), answer[:500]
        found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert found
        while len(body) < int(found[1]):
            body += self.socket.recv(1 << 20)
        return body


def http_request(path: str, body: bytes, kind: str = "application/json") -> bytes:
    """The bytes of one POST."""
    head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: bench\r\nX-API-Key: tml-bench\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return (head + "Accept: application/x-protobuf\r\n\r\n").encode() + body


def main(host: str, port: int) -> None:
    requests = [(kind, base64.b64decode(text)) for kind, text in map(json.loads, sys.stdin)]
    connection, times = Connection(host, port), []
    for kind, request in requests:
        sent = time.perf_counter()
        ack = connection.exchange(request)
        request_id = json.loads(ack)["request_id"]
        connection.exchange(http_request("retrieve_future", json.dumps({"request_id": request_id}).encode()))
        times.append((kind, sent, time.perf_counter()))
    print(json.dumps(times))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
