"""Make this machine look like an unequal cluster: speed, memory and links."""
