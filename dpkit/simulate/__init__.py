"""The product itself on a virtual clock: traces in, measures of each policy out.

Nothing of a cluster is built a second time here. Engines, schedulers, coordinator, clients and
policies are those of `open_cluster`; only the models (`cost:PRESET`) compute nothing, and the clock
jumps from one event to the next.
"""
