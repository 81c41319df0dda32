"""What a run has done, for people and their tools: the event log, and everything that reads it."""
