"""The loop: collect, learn, guard, write."""
