"""Tools for whoever tests dpkit or builds on it; docs/testing.md tells them apart.

* Every schedule, every failure: `sweep` (cancel at every step), `failing` (fail at every call, and
  pairs of both), `explorer` (all orders of a small race), `world` (a whole cluster from a seed).
* What to put in: `faults` (models that fail as planned), `links` (bad lines), `wrapper` (models
  around models), `http` (a server without a network).
* What to check: `history` (one outcome a request, no token lost or invented), `idle` (nothing is
  held), `leaks` (nothing is left), `processes` (who is alive), `conformance` (the contracts of
  models, policies, links and launchers).
* Replays of recorded behaviour, as modules to run: `picks`, `coordinator`.

Of the rest of dpkit only `dpkit run --audit` imports this: it asks `idle`.
"""
