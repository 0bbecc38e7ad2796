"""Workers that share what was prepared once, keep a state of their own, and can be killed.

A zygote computes primes; workers forked from it answer questions about them. One question makes a
worker hang, which nothing in Python could end: it is killed, and a new one is there in
milliseconds. Nothing outlives this program, however it ends. Run it:
    python examples/killable_workers.py
"""

from __future__ import annotations

import socket

import trio

from dpkit.launch.zygote import open_zygote


def prepare(limit: int) -> list[int]:
    """Runs once, in the zygote: the primes below `limit`."""
    sieve = bytearray([1]) * limit
    for number in range(2, int(limit**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, limit, number)))
    return [number for number in range(2, limit) if sieve[number]]


def work(primes: list[int], port: int) -> None:
    """Runs in each worker, a plain blocking program: answers until the connection is closed."""
    answered = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for line in connection.makefile():
            while int(line) < 0:  # "there is no such prime", its author meant to say
                pass
            answered += 1
            connection.sendall(f"{primes[int(line)]}, my answer no. {answered}".encode())


async def ask(stream: trio.SocketStream, question: int) -> str | None:
    """Ask a worker; None: it doesn't answer."""
    with trio.move_on_after(0.5):
        await stream.send_all(f"{question}\n".encode())
        return (await stream.receive_some()).decode()
    return None


async def main() -> None:
    """Have two workers, one after the other, and see the first one hang."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    async with (
        listener,
        open_zygote("killable_workers:prepare", {"limit": 200_000}, name="primes") as zygote,
    ):
        for name, questions in ("first", (10, 10_000, -1)), ("second", (10,)):
            async with zygote.open_worker(
                "killable_workers:work", {"port": port}, name=name, grace=1
            ) as worker:
                async with await listener.accept() as stream:
                    for question in questions:
                        answer = await ask(stream, question)
                        print(f"{name}: prime no. {question} is {answer}")
                        if answer is None:
                            worker.kill()
                await worker.wait()
            print(f"{name} {worker.status}")


if __name__ == "__main__":
    trio.run(main)
