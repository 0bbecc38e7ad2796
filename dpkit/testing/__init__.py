"""Tools for whoever tests dpkit or builds on it; those that compare recordings run as modules.

Nothing in dpkit imports this package.
"""
