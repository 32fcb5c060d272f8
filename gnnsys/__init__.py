"""Distributed graph neural network training in plain PyTorch."""
