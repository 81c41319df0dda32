"""The production planner and controller on a virtual cluster with a virtual clock: hours of training in seconds."""
