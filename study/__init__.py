"""An experiment made of the commands; docs/study.md is its design."""
