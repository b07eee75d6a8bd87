"""Sweeps: many runs in one folder. Grids of specs, pools of processes, and the folder of a sweep."""
