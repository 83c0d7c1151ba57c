"""What knows nothing of models or RL: files, keys, meshes, compilation."""
