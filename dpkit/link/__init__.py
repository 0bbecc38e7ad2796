"""Who stands at either end of the wire, and how a client reaches one engine.

A link (`local`, `zmq`) is one kind of neighbourhood. `engine` is the far end of one: an engine that
serves whoever owns its handshake. `coordinator` tells clients the engines' loads, `snapshots` hears
it.
"""
