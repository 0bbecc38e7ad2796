"""Answer lines over TCP, and write each token into its socket without waking a task for it.

A connection's task sleeps while its answer is generated: the sink of the request writes. That is
the cheapest way to serve many streams at once. Three clients in this program try it out.

Run it:  python examples/serve_lines.py
"""

import os
from functools import partial

import trio

import dpkit

CONFIG = dpkit.parse_config("""
    [[engines]]
    name = "engine"
    model = "cost:h100-8b"      # sleeps as long as an H100 would take for each step
    count = 2
""")


class Answer:
    """One answer on its way into a socket; the sink of its request."""

    def __init__(self, client: dpkit.Client, prompt: str, stream: trio.SocketStream) -> None:
        self.unsent = b""
        self.ended = trio.Event()
        self._file = stream.socket.fileno()
        # As many as the prompt has: this model says it again and again.
        self.submission = client.submit(prompt, sink=self, max_tokens=len(prompt))

    def __call__(self, output: dpkit.EngineOutput) -> None:
        """Write what has come; what the socket has no room for goes with what comes next."""
        self.unsent += self.submission.take_text().encode()
        try:
            self.unsent = self.unsent[os.write(self._file, self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the other end has gone
            self.submission.close()
            self.ended.set()
        if output.finish_reason is not None:
            if output.error is not None:
                self.unsent += f" [failed: {output.error}]".encode()
            self.ended.set()


async def serve(client: dpkit.Client, stream: trio.SocketStream) -> None:
    """Answer one line."""
    prompt = await stream.receive_some()
    answer = Answer(client, prompt.decode().strip(), stream)
    try:
        await answer.ended.wait()
        await stream.send_all(answer.unsent + b"\n")
    except trio.BrokenResourceError:
        pass
    finally:
        answer.submission.close()  # however the task ends, nobody computes for it any more


async def ask(port: int, prompt: str) -> None:
    """Be a client: print the answer, and how many pieces it came in."""
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(f"{prompt}\n".encode())
        pieces = [piece async for piece in stream]
    print(f"{b''.join(pieces).decode().strip()!r} came in {len(pieces)} pieces")


async def main() -> None:
    """Serve, ask three times, and look at the books."""
    async with dpkit.open_cluster(CONFIG) as cluster, trio.open_nursery() as nursery:
        handler = partial(serve, cluster.client)
        listeners = await nursery.start(trio.serve_tcp, handler, 0)
        port = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as clients:
            for prompt in ("one fish", "two fish", "red fish"):
                clients.start_soon(ask, port, prompt)
        statistics = cluster.client.statistics()
        print(f"{statistics.finished} answers, in flight {sum(statistics.inflight.values())}")
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
