"""Completions to rewards and advantages: scorer, groups, evaluation."""
