"""Model architectures, one file each, free of torch."""
