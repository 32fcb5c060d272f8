"""Rows that live in host memory: what a bin needs is copied to the device before it is due, what it made comes back."""
