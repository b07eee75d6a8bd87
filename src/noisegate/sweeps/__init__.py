"""Many runs in one folder: which, how several at a time, and where they are kept."""
