"""The version, in a module that needs nothing else to be read."""

__version__ = "0.1.0"
