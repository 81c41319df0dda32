"""Search for the best plan, with reasons. Pure: numbers in, a frozen Plan out."""
