"""Counterpoint: train PyTorch models whose training state does not fit in memory."""
