"""The structured-concurrency heart; docs/nursery.md draws the tree.

* the tree: `cluster`, built by `build` and `limits`, on `services` (tasks that outlive the body)
  and `context`
* an engine: `roster` (all of them), `slot` (one place), `supervisor` (its lives), `busyloop` (one
  life), `runner` (where steps run), `inbox`, `membership` (who may be picked), `reload`
* a request: `client`, `requests` and `prompts` (making it), `stream` and `mailbox` (reading it),
  `flights` and `flight` (what becomes of it in between)
* what is known: `fanin` and `coordinator` (loads), `events` and `eventwriter`, `steplog`, `dump`

The only package that owns tasks. Everything it decides lives in sans-IO packages (`dpkit.engine`,
`dpkit.balancer`); here those decisions meet time, wake-ups and cancellation.
"""
