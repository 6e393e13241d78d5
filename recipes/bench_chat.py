"""What the chat server adds to a request: 200 sessions of 5 turns at once over real sockets, beside an engine that only sleeps.

    python recipes/bench_chat.py --sessions 200 --turns 5 --seconds 3

Server and clients are two processes. Overhead = what the client waited - what the scripted engine slept, in milliseconds:
HTTP, rendering, tokenising, comparing, committing, and waiting for the event loop behind the other sessions.
"""

import asyncio
import json
import multiprocessing
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Bench:
    model: str = str(ROOT / "recipes/tiny")   # whose tokenizer and template are used
    sessions: int = 200                # at once
    turns: int = 5                     # requests of a session, each with the whole history
    words: int = 50                    # of each user message
    tokens: int = 50                   # of each answer
    seconds: float = 3.0               # that an answer takes, on average


def serve(cfg: Bench, doors, results) -> None:
    """The server's process: puts the sessions' doors, then what the engine slept for each answer."""
    from transformers import AutoTokenizer

    from agent import Budget
    from chat_server import ChatServer
    from generator import Completion

    tokenizer, slept = AutoTokenizer.from_pretrained(cfg.model), {}

    def engine(session: int):
        async def generate(token_ids, max_tokens, stop, turn, images=()):
            began = time.perf_counter()
            await asyncio.sleep(cfg.seconds * random.uniform(0.5, 1.5))
            ids = np.random.randint(32, 120, cfg.tokens)
            slept[session, turn] = time.perf_counter() - began
            return Completion(ids, np.zeros(cfg.tokens), np.zeros(cfg.tokens, int), "length")
        return generate

    async def run() -> None:
        server = ChatServer(tokenizer, cfg.model)
        await server.start()
        sessions = [server.open(engine(i), Budget(1_000_000), 1.0) for i in range(cfg.sessions)]
        doors.put([(s.base_url, s.key) for s in sessions])
        while len(slept) < cfg.sessions * cfg.turns:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        segments = [len(server.close(s)) for s in sessions]
        results.put((slept, segments))
        await server.stop()

    asyncio.run(run())


async def post(stream, path: str, key: str, body: bytes) -> dict:
    """One request on a kept-alive connection: a client that costs next to nothing, as both processes may share a core."""
    reader, writer = stream
    writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = int(head.split("content-length: ")[1].split("\r\n")[0])
    reply = json.loads(await reader.readexactly(length))
    assert " 200 " in head.split("\r\n")[0], reply
    return reply


async def talk(cfg: Bench, doors: list) -> dict:
    """All sessions at once: (session, turn) -> seconds that the client waited."""
    waited = {}

    async def session(i: int, url: str, key: str) -> None:
        await asyncio.sleep(random.uniform(0, cfg.seconds))                    # rollouts do not start in the same millisecond
        address, path = url.removeprefix("http://").split("/", 1)
        stream = await asyncio.open_connection(*address.split(":"))
        messages = []
        for turn in range(cfg.turns):
            messages.append({"role": "user", "content": " ".join(random.choices(["plan", "hello", "12", "+"], k=cfg.words))})
            body = json.dumps({"model": "m", "messages": messages}).encode()
            began = time.perf_counter()
            reply = await post(stream, f"/{path}/chat/completions", key, body)
            waited[i, turn] = time.perf_counter() - began
            messages.append(reply["choices"][0]["message"])
        stream[1].close()

    await asyncio.gather(*[session(i, *door) for i, door in enumerate(doors)])
    return waited


def main(cfg: Bench) -> None:
    context = multiprocessing.get_context("spawn")
    doors, results = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(cfg, doors, results), daemon=True)
    process.start()
    waited = asyncio.run(talk(cfg, doors.get()))
    slept, segments = results.get()
    process.join()
    overhead = 1e3 * np.array([waited[k] - slept[k] for k in waited])
    assert set(segments) == {1}, f"each session is one conversation, so one segment; got {sorted(set(segments))}"
    print(json.dumps({"requests": len(overhead), "median_ms": round(float(np.median(overhead)), 2), "p90_ms": round(float(np.quantile(overhead, 0.9)), 2),
                      "p99_ms": round(float(np.quantile(overhead, 0.99)), 2), "first_turn_median_ms": round(float(np.median(overhead[[k[1] == 0 for k in waited]])), 2)}))


if __name__ == "__main__":
    main(tyro.cli(Bench))
