"""Execute plans on real devices: the trainer, the step, gradients, the loader."""
