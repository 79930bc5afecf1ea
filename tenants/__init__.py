"""Teams, keys, quotas and the ledger, in SQL and in memory."""
