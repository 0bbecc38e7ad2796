"""One engine, sans-IO: request states, paged KV blocks, the scheduler, and models to drive.

Knows nothing of Trio, sockets, configs or text. Read in this order: `request` (what may happen to
a request), `blocks` (where its KV lives), `scheduler` (what a step computes), `core` (the face).
"""
