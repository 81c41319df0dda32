"""Training across islands: the outer loop over slow links, its numbers, its service and its client."""
