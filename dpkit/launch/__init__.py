"""Processes that end with whoever started them: killable, stateful workers."""
