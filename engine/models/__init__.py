"""Model files: found, converted, checked. No torch."""
