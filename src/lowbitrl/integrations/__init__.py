"""Adapters to other libraries' trainers. Nothing here is imported by the rest of the package."""
