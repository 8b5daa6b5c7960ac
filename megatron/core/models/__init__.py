"""Llama (arXiv 2407.21783): embedding, layers, output layer, built from the parallel layers."""
