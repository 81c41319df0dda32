"""Parts of the `eta` benchmark."""
