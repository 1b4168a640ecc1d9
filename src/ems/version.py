"""The release of this EMS."""

__version__ = "0.1.0"
