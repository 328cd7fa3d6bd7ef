"""A package of the user's own that has the name of one of rankscope's folders."""


def mean(values):
    return sum(values) / len(values)
