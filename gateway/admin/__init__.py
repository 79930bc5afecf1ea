"""The admin API: teams, keys, tiers, quotas, reports, and the client that the commands use."""
