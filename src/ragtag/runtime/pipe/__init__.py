"""The uneven pipeline: each rank holds some of the model's blocks, and samples pass one rank after the other."""
