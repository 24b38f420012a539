"""A family outside of the zoo, found by its entry point."""
