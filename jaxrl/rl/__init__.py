"""Algorithms as compositions of pieces, and the pure optimiser step they feed."""
