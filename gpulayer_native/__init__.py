"""Fused optimizer kernels, and the pure-torch reference with the same API."""
