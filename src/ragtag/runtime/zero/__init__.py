"""Model state cut into slices of any size, one a rank (Rajbhandari et al. 2020, "ZeRO")."""
