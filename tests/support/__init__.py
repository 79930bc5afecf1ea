"""What several tests share: engines, stores, servers, drivers and references, in folders like those of the tests."""
