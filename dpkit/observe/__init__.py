"""What a cluster and its server are like, for Prometheus: vLLM's metrics, and dpkit's own.

From the inside out: `catalogue` is the list of all families. `tallies` counts what happens, as it
happens. `numbers` takes a look at everything; `rows` makes the catalogue's families of that, and
`render` their text. `metrics` is the route.

Needs the extra ``serve``. Nothing else in dpkit knows of this package.
"""

from __future__ import annotations

from dpkit.observe.metrics import Metrics

__all__ = ["Metrics"]
