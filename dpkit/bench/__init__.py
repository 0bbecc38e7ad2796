"""Load on a server or on a cluster, and what it was like for those who waited.

From the inside out: `lengths`, `trace` and `prompts` say what is asked, `arrivals` and `plan` when;
`load` sends it to a `target` and keeps a `record` of each request; `summary` counts, and `text`,
`markdown` and `html` tell. `session` is all of it in one call; `dpkit.cli.bench` is the command.
"""
