"""A reward for tests, in verl's signature. verl loads this file by its path."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Share of digits, 1 for four or more: a random model gets some, so that rewards differ."""
    return min(1.0, sum(c.isdigit() for c in solution_str) / 4)
