"""Completions to what an update learns from: rewards, groups, replay."""
