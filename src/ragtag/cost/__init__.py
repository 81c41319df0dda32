"""Predict time and memory of a plan from measurements. Pure: numbers in, numbers out."""
