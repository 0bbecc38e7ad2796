"""Tools for whoever tests dpkit or builds on it.

`sweep` cancels a task at every step, `check_idle` proves that nothing was left behind; `picks` and
`coordinator` are modules to run, which replay recorded behaviour. Nothing in dpkit imports this.
"""
