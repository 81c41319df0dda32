"""Complete training scripts that use only the public interface: run, read, copy."""
