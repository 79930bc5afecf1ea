"""The model on a device. Torch is imported here and nowhere else."""
