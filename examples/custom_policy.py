"""Bring your own balancing policy: one class, named in the config as "module:Class".

This one keeps a tenant on one engine, by its cache salt, unless that engine is much busier than
the others. Run it:  python examples/custom_policy.py
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from pathlib import Path

import trio

import dpkit

CONFIG = """
    [[engines]]
    model = "echo"
    count = 4

    [balancer]
    policy = "custom_policy:StickyTenants"
"""


class StickyTenants(dpkit.Policy):
    """The tenant's own engine, if it is at most `slack` requests above the least loaded one."""

    slack = 4

    def pick(self, request: dpkit.GenerateRequest, view: dpkit.LoadView) -> int:
        """Index of the engine for `request`: synchronous, no I/O."""
        inflight = view.inflight
        home = zlib.crc32(request.cache_salt.encode()) % len(inflight)
        if inflight[home] <= min(inflight) + self.slack:
            return home
        return inflight.index(min(inflight))


async def main() -> None:
    """Send ten requests of each of three tenants, one after the other, and show where they went."""
    async with dpkit.open_cluster(dpkit.parse_config(CONFIG)) as cluster:
        for tenant in ("ada", "grace", "edsger"):
            engines: Counter[str] = Counter()
            for number in range(10):
                done = await cluster.client.complete(f"question {number}", cache_salt=tenant)
                engines[done.engine.name] += 1
            print(f"{tenant:8} {dict(engines)}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # where the config finds "custom_policy"
    trio.run(main)
