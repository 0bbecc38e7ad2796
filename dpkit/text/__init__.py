"""Tokenizers: text to token ids and back, at the client. Knows nothing of engines or weights."""
