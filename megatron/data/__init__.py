"""Data: tokenizers, indexed token files, sample order, datasets and loaders."""
