"""Reports and membership in, decisions out. Pure state machines that can be walked without hardware."""
