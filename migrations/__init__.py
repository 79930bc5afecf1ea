"""Schema revisions, applied at start under a lock by `tenants.migrate`."""
