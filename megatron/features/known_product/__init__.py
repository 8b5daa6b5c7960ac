"""A matrix product whose bits are known on every processor, as a test of the arithmetic."""
