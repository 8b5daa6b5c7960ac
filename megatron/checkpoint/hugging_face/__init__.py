"""Models in Hugging Face's format: ``config.json``, names of tensors, reading and writing."""
