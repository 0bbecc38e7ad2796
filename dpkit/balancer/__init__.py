"""Which engine gets a request: ledger, view, dispatch, policies, and the coordinator's rules.

Sans-IO: every call is synchronous, decides and returns; the nursery does the I/O. Knows nothing of
Trio, sockets, the config file or the inside of an engine.
"""
