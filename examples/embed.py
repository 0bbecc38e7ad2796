"""Embed a cluster in a Trio program: the nursery tree lives and dies with one `async with`.

Run it:  python examples/embed.py [CONFIG.toml] [PROMPT]
"""

import sys

import trio

import dpkit

ECHO = dpkit.parse_config("""
    [[engines]]
    model = "echo"
    count = 2
""")


async def main() -> None:
    """Stream one answer while another one is completed in the background."""
    config = sys.argv[1] if len(sys.argv) > 1 else ECHO
    prompt = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time"

    async with dpkit.open_cluster(config) as cluster:
        background: list[dpkit.Completion] = []

        async def in_the_background() -> None:
            background.append(await cluster.client.complete("A second request", max_tokens=64))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(in_the_background)
            async with cluster.client.generate(prompt, max_tokens=64) as stream:
                print(f"{stream.engine}: ", end="")
                async for output in stream:
                    print(output.text, end="", flush=True)
            print(f"\nended by {stream.finish_reason}")
        print(f"meanwhile {background[0].engine} answered {background[0].text!r}")


if __name__ == "__main__":
    trio.run(main)
