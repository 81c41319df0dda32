"""An island's side of training over slow links: exact synchronisation inside, an outer loop across."""
