"""The engine process: sequences, steps, KV memory, the model. Files here are values that all folders below use."""
