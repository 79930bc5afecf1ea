"""What has been counted, as Prometheus and vLLM's dashboards read it."""
