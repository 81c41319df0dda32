"""The hub: who is in the run, generation by generation. Its rules are pure; its process never imports torch."""
