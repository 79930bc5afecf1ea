"""Reports as pages, pictures and CSV."""
