"""Weights and optimizer state after training: bit for bit those of a plain PyTorch loop."""
