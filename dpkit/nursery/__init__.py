"""The structured-concurrency heart: services, busy loops, fan-in, coordinator, client, cluster.

The only package that owns tasks. Everything it decides lives in sans-IO packages (`dpkit.engine`,
`dpkit.balancer`); here those decisions meet time, wake-ups and cancellation.
"""
