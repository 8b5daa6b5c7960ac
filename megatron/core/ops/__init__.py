"""The operations of a transformer layer: a reference of each, and the faster version that training uses."""
