"""The `ragtag` command. Verbs import what they need inside functions, so `--help` never imports torch."""
