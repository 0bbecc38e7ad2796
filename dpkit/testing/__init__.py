"""Tools for whoever tests dpkit or builds on it: replays of recorded behaviour, as modules to run.

Nothing in dpkit imports this package.
"""
