"""Llama (arXiv 2407.21783): embedding, layers, head, built from the parallel layers."""
