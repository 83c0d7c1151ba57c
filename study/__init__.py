"""Experiments made of the commands: docs/study.md and study_toy.md."""
