"""Every flag: its name, default, help and check. One frozen dataclass per group; nothing heavy is imported."""
