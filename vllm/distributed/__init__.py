"""Ranks: where each stands, and how they exchange tensors."""
