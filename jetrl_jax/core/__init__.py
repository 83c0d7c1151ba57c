"""Basics without models or RL: files, random keys, meshes, compilation."""
