"""What each method adds to the choice for `plain`: rows, groups, update rules."""
