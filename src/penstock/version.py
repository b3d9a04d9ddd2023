"""The version of Penstock."""

__version__ = "0.1.0"
