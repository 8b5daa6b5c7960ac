"""Command lines: words to a dataclass, all mistakes at once, and the help. Used by training and by every tool."""
