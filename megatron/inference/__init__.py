"""Text from a model: loading without an optimizer, the cached passes, sampling."""
