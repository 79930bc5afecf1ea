"""KV memory behind one door (`manager`): claims, moves between device and host, bills."""
