"""Serve a cluster of your own program over HTTP, beside whatever else the program does.

`serve_http` is a task like any other: it ends when it is told to, or with its nursery. Here a
client in the same program asks for a chat, piece by piece, as any client of OpenAI's API does.

Run it:  python examples/serve_http.py
"""

import json
import urllib.request

import trio

import dpkit
from dpkit.serve import serve_http

CONFIG = dpkit.parse_config("""
    [[engines]]
    name = "engine"
    model = "cost:h100-8b"      # sleeps as long as an H100 would take for each step
    count = 2

    [server]
    listen = "127.0.0.1:0"      # any port that is free
    model_name = "parrot"
""")


def chat(address: str) -> None:
    """Ask, and print what comes as it comes."""
    asked = {
        "model": "parrot",
        "messages": [{"role": "user", "content": "Polly wants a cracker"}],
        "max_tokens": 27,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://{address}/v1/chat/completions", json.dumps(asked).encode()
    )
    with urllib.request.urlopen(request) as response:  # noqa: S310 - our own address
        print(f"{response.headers['x-dpkit-engine']} says: ", end="")
        for line in response:
            if line.startswith(b"data: {"):
                [choice] = json.loads(line.removeprefix(b"data: "))["choices"]
                print(choice["delta"]["content"], end="", flush=True)
        print()


async def main() -> None:
    """Serve, ask, and end in good order."""
    async with dpkit.open_cluster(CONFIG) as cluster, trio.open_nursery() as nursery:
        service = await nursery.start(serve_http, cluster)
        await trio.to_thread.run_sync(chat, service.addresses[0])
        service.stop(trio.current_time() + 5)  # whoever is still answered may take so long


if __name__ == "__main__":
    trio.run(main)
