"""The operations of a Llama layer: a plain reference of each, and the faster version that training uses."""
