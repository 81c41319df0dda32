"""Save and restore training state as one safetensors file, independent of plan and rank count."""
