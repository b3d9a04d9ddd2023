"""Benchmarks, one module for each figure. ``penstock bench NAME`` runs them; README.md says how to read them."""
