"""Links: how a client reaches one engine. Each module is one kind of neighbourhood."""
